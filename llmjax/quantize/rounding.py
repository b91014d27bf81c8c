"""How schemes round the other factor before they multiply (W8A8); kernels do it."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from llmjax_kernels.quant_matmul import RANGES, InputFormat

_REACH = {"int8": 127.5, "fp8_e4m3": RANGES["fp8_e4m3"][1]}
"""Integers' range is 255 steps, as compressed-tensors has it, and saturates to 127."""


def input_format(code: str, *, group: int = 0, static: bool = False) -> InputFormat:
    """Rounded to "int8" or "fp8_e4m3"; see `InputFormat`."""
    return InputFormat(code, group, _REACH[code], static)


def static_inputs(greatest: Float[Array, ""], format: InputFormat) -> Float[Array, " 2"]:
    """Scale and zero point at which the greatest magnitude is the end of the range."""
    scale = jnp.maximum(greatest / format.reach, jnp.finfo(jnp.float32).tiny)
    return jnp.stack([scale, jnp.zeros_like(scale)])
