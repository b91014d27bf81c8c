"""Rounding to nearest: int8, int4, fp8, nvfp4 and mxfp4, with or without rounded inputs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from llmjax_kernels.quant_matmul import InputFormat

from ..errors import ConfigError
from .config import QuantizeConfig
from .float_codes import FP8_BLOCK, MXFP4_BLOCK, NVFP4_BLOCK, fp8, mxfp4, nvfp4
from .formats import int_format
from .grid import Grid, IntCodes, groups_of_neighbours
from .hub import Target
from .layer import Coded, Layer, Place
from .rounding import input_format, static_inputs

FEW_BITS = 4
"""Of codes between which bfloat16 has places enough."""


def quantise(layer: Layer, config: QuantizeConfig) -> None:
    """Every place by itself."""
    for place in layer.places:
        scale = None
        if config.activations == "static":
            [inputs] = layer.inputs([place])
            scale = static_scale(layer, config, inputs.typical)
        quantise_place(layer, place, config, scale)


def quantise_place(
    layer: Layer, place: Place, config: QuantizeConfig, scale: np.ndarray | None
) -> None:
    """Rounds a place's matrices, and its input from now on.

    Args:
        scale: of the input, where it is static; as `static_scale` gives it.
    """
    for target in layer.targets_at(place):
        coded = _coded(layer, place, target, config)
        if scale is not None:
            coded.tensors["input_scale"] = scale.reshape(1).astype(layer.dtype)
        layer.put(target, coded)
    rounding = input_rounding(config)
    if rounding is not None:
        static = None if scale is None else np.append(scale, np.float32(0))
        layer.round_inputs(place, rounding, static)


def input_rounding(config: QuantizeConfig) -> InputFormat | None:
    """What becomes of inputs; None leaves them."""
    if config.activations in (None, "none"):
        return None
    group = FP8_BLOCK if config.granularity == "block" else 0
    code = "fp8_e4m3" if config.family == "fp8" else "int8"
    return input_format(code, group=group, static=config.activations == "static")


def static_scale(layer: Layer, config: QuantizeConfig, greatest: Float[Array, ""]) -> np.ndarray:
    """The one scale of all inputs of a place, whose range ends at `greatest`, as rounded where it
    is stored; float32 []."""
    rounding = input_rounding(config)
    assert rounding is not None
    scale = np.asarray(static_inputs(greatest, rounding)[0])
    return scale.astype(layer.dtype).astype(np.float32)


def _coded(layer: Layer, place: Place, target: Target, config: QuantizeConfig) -> Coded:
    weight = layer.weight(target)
    if config.family == "fp8":
        assert config.granularity is not None
        if config.granularity == "block" and config.activations == "dynamic":
            _require_blocks(target, weight.shape[1], FP8_BLOCK)
        return fp8(weight, config.granularity, layer.dtype)
    if config.family == "nvfp4":
        _require_blocks(target, weight.shape[1], NVFP4_BLOCK)
        # Kernels take matrices of one input together, and know one scale for them.
        together = [layer.parameters[f"{linear}.weight"] for linear in place.linears]
        return nvfp4(weight, max(float(np.abs(w).max()) for w in together))
    if config.family == "mxfp4":
        _require_blocks(target, weight.shape[1], MXFP4_BLOCK)
        return mxfp4(weight)
    format = int_format(config, layer.dtype)
    return format.coded(nearest(weight, format.grid, format.group_of(target, weight.shape)))


def _require_blocks(target: Target, K: int, block: int) -> None:
    if K % block:
        raise ConfigError(
            f"layer {target.module} has rows of {K} inputs, which are no whole blocks of {block}; "
            "allowed: to ignore it"
        )


def nearest(weight: Float[np.ndarray, "N K"], grid: Grid, group: int) -> IntCodes:
    """The codes nearest to a matrix's weights, groups of neighbours."""
    codes, scales, zeros = map(np.asarray, _nearest(jnp.asarray(weight), grid=grid, group=group))
    groups = groups_of_neighbours(weight.shape[1], group)
    return IntCodes(grid, codes.astype(np.uint8), scales, zeros.astype(np.uint8), groups)


@partial(jax.jit, static_argnames=("grid", "group"))
def _nearest(
    weight: Float[Array, "N K"], *, grid: Grid, group: int
) -> tuple[Float[Array, "N K"], Float[Array, "N G"], Float[Array, "N G"]]:
    grouped = weight.reshape(len(weight), -1, group)
    low, high = jnp.min(grouped, axis=2), jnp.max(grouped, axis=2)
    if grid.bits <= FEW_BITS:
        scale, zero, codes = _coarsely(grouped, low, high, grid)
    else:
        scale, zero = grid.fit(low, high)
        codes = grid.codes(grouped, scale[:, :, None], zero[:, :, None])
    return codes.reshape(weight.shape), scale, zero


def _coarsely(
    grouped: Float[Array, "N G g"], low: Float[Array, "N G"], high: Float[Array, "N G"], grid: Grid
) -> tuple[Float[Array, "N G"], Float[Array, "N G"], Float[Array, "N G g"]]:
    """Scales, zero points and codes in bfloat16, as compressed-tensors computes them.

    What is in the middle between two codes but for the rounding of its scale goes to the even one.
    In a symmetric group of 4 bits that is the greatest magnitude, 7.5 steps: where there is such a
    code it grows to 8, and never shrinks to 7, which costs 4% of SmolLM2's perplexity.
    """

    def rounded(x: Array) -> Array:
        return lax.reduce_precision(x, 8, 7)

    low, high, middle = jnp.minimum(low, 0), jnp.maximum(high, 0), 2 ** (grid.bits - 1)
    if grid.symmetric:
        scale, zero = grid.fit(low, high)
    else:
        scale = grid.stored(rounded(high - low) / grid.last)
        shift = jnp.clip(rounded(-middle - rounded(low / scale)), -middle, middle - 1)
        zero = jnp.round(shift) + middle
    shift = zero - middle
    places = rounded(rounded(grouped / scale[:, :, None]) + shift[:, :, None])
    return scale, zero, jnp.round(jnp.clip(places, -middle, middle - 1)) + middle
