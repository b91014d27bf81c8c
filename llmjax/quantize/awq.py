"""AWQ: channels that carry much are scaled up before weights are rounded.

Source: Lin et al. 2023, https://arxiv.org/abs/2306.00978. Errors are those of the outputs of a
place's matrices, which X^T X gives exactly.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .config import QuantizeConfig
from .folding import fold, gathered
from .formats import IntFormat, int_format
from .grid import Grid, IntCodes, groups_of_neighbours
from .layer import Inputs, Layer, Place

RATIOS = 20
"""Exponents that are tried, from 0 up."""
SHRINKS = 10
"""Ranges that are tried, in steps of 5% less."""
_SHRINK_STEP = 0.05
_LEAST = 1e-4
_NOT_CLIPPED = ("attn.q.weight", "attn.k.weight")
"""An error of scores is not what their softmax makes of it (as the paper's code has it)."""


def quantise(layer: Layer, config: QuantizeConfig) -> None:
    """Scales all places first, as one changes matrices of another; then rounds."""
    format = int_format(config, layer.dtype)
    given = layer.inputs(layer.places, gram=True)
    scaled = [
        _scale(layer, place, inputs, format)
        for place, inputs in zip(layer.places, given, strict=True)
    ]
    for place, gram in zip(layer.places, scaled, strict=True):
        for target in layer.targets_at(place):
            weight = layer.weight(target)
            group = format.group_of(target, weight.shape)
            is_clipped = config.clip and not set(_NOT_CLIPPED) & set(target.members)
            codes = rounded(weight, gram, format.grid, group, SHRINKS if is_clipped else 1)
            layer.put(target, format.coded(codes))


def _scale(layer: Layer, place: Place, inputs: Inputs, format: IntFormat) -> Float[Array, "K K"]:
    """Folds the best scale; gives X^T X of the input as it then is."""
    if place.before is None:
        return inputs.gram
    targets = layer.targets_at(place)
    weight = np.concatenate([layer.weight(target) for target in targets])
    group = format.group_of(targets[0], weight.shape)
    scales = candidates(place, np.asarray(inputs.mean), weight, group)
    losses = scale_losses(
        jnp.asarray(weight),
        inputs.gram,
        jnp.asarray(scales[:, place.channels]),
        grid=format.grid,
        group=group,
    )
    across = jnp.asarray(fold(layer, place, scales[int(jnp.argmin(losses))]))
    return inputs.gram / jnp.outer(across, across)


def candidates(
    place: Place, mean: Float[np.ndarray, " K"], weight: Float[np.ndarray, "N K"], group: int
) -> Float[np.ndarray, "C channels"]:
    """Scales to try: powers of the inputs' mean magnitude, alone and over the weights' own.

    The first is 1 throughout.
    """
    counts = np.bincount(place.channels)
    inputs = gathered(place, mean, np.add) / counts
    sizes = np.abs(weight).reshape(len(weight), -1, group)
    relative = sizes / np.maximum(sizes.max(axis=2, keepdims=True), np.float32(1e-12))
    weights = gathered(place, relative.reshape(weight.shape).mean(axis=0), np.add) / counts
    ratios = np.arange(RATIOS, dtype=np.float32)[:, None] / RATIOS
    alone = np.maximum(inputs, 1e-12) ** ratios
    both = alone / np.maximum(weights, 1e-12) ** (1 - ratios)
    scales = np.maximum(np.concatenate([alone, both]), _LEAST)
    middle = np.sqrt(scales.max(axis=1, keepdims=True) * scales.min(axis=1, keepdims=True))
    return (scales / middle).astype(np.float32)


@partial(jax.jit, static_argnames=("grid", "group"))
def scale_losses(
    weight: Float[Array, "N K"],
    gram: Float[Array, "K K"],
    scales: Float[Array, "C K"],
    *,
    grid: Grid,
    group: int,
) -> Float[Array, " C"]:
    """The mean squared error of the outputs, over N and tokens, that each scale gives."""

    def loss(scale: Float[Array, " K"]) -> Float[Array, ""]:
        grouped = (weight * scale).reshape(len(weight), -1, group)
        error = grid.nearest(grouped).reshape(weight.shape) / scale - weight
        return jnp.sum(jnp.matmul(error, gram, precision="float32") * error) / len(weight)

    return jax.lax.map(loss, scales)


def rounded(
    weight: Float[np.ndarray, "N K"],
    gram: Float[Array, "K K"],
    grid: Grid,
    group: int,
    shrinks: int,
) -> IntCodes:
    """Codes of weights that are clipped first, each group to where its output's error is least.

    Args:
        shrinks: how many ranges to try; 1 clips nothing.
    """
    found = _rounded(jnp.asarray(weight), gram, grid=grid, group=group, shrinks=shrinks)
    codes, scales, zeros = map(np.asarray, found)
    groups = groups_of_neighbours(weight.shape[1], group)
    return IntCodes(grid, codes.astype(np.uint8), scales, zeros.astype(np.uint8), groups)


@partial(jax.jit, static_argnames=("grid", "group", "shrinks"))
def _rounded(
    weight: Float[Array, "N K"], gram: Float[Array, "K K"], *, grid: Grid, group: int, shrinks: int
) -> tuple[Float[Array, "N K"], Float[Array, "N G"], Float[Array, "N G"]]:
    grouped = weight.reshape(len(weight), -1, group)
    G = grouped.shape[1]
    # Of each group its own part of X^T X: what groups do to each other is left out, as AWQ does.
    own = gram.reshape(G, group, G, group)[jnp.arange(G), :, jnp.arange(G), :]
    greatest = jnp.max(jnp.abs(grouped), axis=2, keepdims=True)

    def clipped(shrink: Array) -> Float[Array, "N G g"]:
        return jnp.clip(grouped, -greatest * shrink, greatest * shrink)

    def loss(shrink: Array) -> Float[Array, "N G"]:
        error = grid.nearest(clipped(shrink)) - grouped
        return jnp.einsum("ngi,gij,ngj->ng", error, own, error, precision="float32")

    steps = 1 - _SHRINK_STEP * jnp.arange(shrinks)
    best = steps[jnp.argmin(jax.lax.map(loss, steps), axis=0)][:, :, None]
    kept = clipped(best)
    scale, zero = grid.fit(jnp.min(kept, axis=2), jnp.max(kept, axis=2))
    codes = grid.codes(kept, scale[:, :, None], zero[:, :, None])
    return codes.reshape(weight.shape), scale, zero
