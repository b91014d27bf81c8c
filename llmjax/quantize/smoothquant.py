"""SmoothQuant: what makes inputs hard to round is moved into the weights, in part.

Source: Xiao et al. 2022, https://arxiv.org/abs/2211.10438: s = max|X|^a / max|W|^(1 - a), with a
searched for each place by the error of its outputs.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from llmjax_kernels.quant_matmul import InputFormat, round_rows

from .config import QuantizeConfig
from .folding import fold, gathered
from .formats import int_format
from .grid import Grid
from .layer import Inputs, Layer, Place
from .nearest import input_rounding, quantise_place, static_scale
from .rounding import static_inputs

ALPHAS = tuple(i / 20 for i in range(21))
"""Exponents that are tried; and no smoothing at all."""
_LEAST = 1e-5


def quantise(layer: Layer, config: QuantizeConfig) -> None:
    """Smooths all places first, as one changes matrices of another; then rounds."""
    given = layer.inputs(layer.places)
    smoothed = [
        _smooth(layer, place, inputs, config)
        for place, inputs in zip(layer.places, given, strict=True)
    ]
    for place, greatest in zip(layer.places, smoothed, strict=True):
        is_static = config.activations == "static"
        scale = static_scale(layer, config, jnp.max(greatest)) if is_static else None
        quantise_place(layer, place, config, scale)


def _smooth(
    layer: Layer, place: Place, inputs: Inputs, config: QuantizeConfig
) -> Float[np.ndarray, " K"]:
    """Folds the best scale; gives the greatest magnitudes of the input as it then is."""
    greatest = np.asarray(inputs.greatest)
    if place.before is None:
        return greatest
    weight = np.concatenate([layer.weight(target) for target in layer.targets_at(place)])
    scales = candidates(place, greatest, weight, config.alpha)
    rounding = input_rounding(config)
    assert rounding is not None
    losses = smoothing_losses(
        jnp.asarray(weight),
        inputs.rows,
        inputs.greatest,
        jnp.asarray(scales[:, place.channels]),
        grid=int_format(config, layer.dtype).grid,
        rounding=rounding,
    )
    return greatest / fold(layer, place, scales[int(jnp.argmin(losses))])


def candidates(
    place: Place,
    greatest: Float[np.ndarray, " K"],
    weight: Float[np.ndarray, "N K"],
    alpha: float | None,
) -> Float[np.ndarray, "C channels"]:
    """Scales to try: that of `alpha` alone where it is given.

    Else those of `ALPHAS`, and 1 throughout.
    """
    inputs = np.maximum(gathered(place, greatest, np.maximum), _LEAST)
    weights = np.maximum(gathered(place, np.abs(weight).max(axis=0), np.maximum), _LEAST)
    tried = ALPHAS if alpha is None else (alpha,)
    scales = [inputs**a / weights ** (1 - a) for a in tried]
    if alpha is None:
        scales.append(np.ones_like(inputs))
    return np.maximum(np.stack(scales), _LEAST).astype(np.float32)


@partial(jax.jit, static_argnames=("grid", "rounding"))
def smoothing_losses(
    weight: Float[Array, "N K"],
    rows: Float[Array, "R K"],
    greatest: Float[Array, " K"],
    scales: Float[Array, "C K"],
    *,
    grid: Grid,
    rounding: InputFormat,
) -> Float[Array, " C"]:
    """The mean squared error of the outputs that each scale gives, inputs and weights rounded.

    Args:
        greatest: magnitude of each channel, for static scales.
    """
    wanted = jnp.matmul(rows, weight.T, precision="float32")

    def loss(scale: Float[Array, " K"]) -> Float[Array, ""]:
        static = static_inputs(jnp.max(greatest / scale), rounding)
        x = round_rows(rows / scale, rounding, static)
        w = grid.nearest((weight * scale)[:, None, :])[:, 0, :]
        return jnp.mean((jnp.matmul(x, w.T, precision="float32") - wanted) ** 2)

    return jax.lax.map(loss, scales)
