"""How a scheme rounds the other factor before it multiplies (W8A8)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

E4M3_MAX = 448.0
_OUTWARD = 1 + 2.0**-20
_HALF_RANGE = {"int8": 127.5, "fp8": E4M3_MAX}


class InputRounding(NamedTuple):
    """Static: a program is compiled for each.

    Attributes:
        code: what values become.
        group: inputs that share a scale; 0 is all of a row.
        is_static: one scale for all, which calibration found, in place of one a row or group.
    """

    code: Literal["int8", "fp8"]
    group: int = 0
    is_static: bool = False


def input_scale(greatest: Float[Array, "*S"], code: str) -> Float[Array, "*S"]:
    """The scale at which the greatest magnitude is the end of the range.

    Integers' range is 255 steps, as compressed-tensors has it: -127.5 to 127.5, which saturates
    to 127.
    """
    return jnp.maximum(greatest / _HALF_RANGE[code], jnp.finfo(jnp.float32).tiny)


def round_inputs(
    x: Float[Array, "*T K"], rounding: InputRounding, scale: Float[Array, ""] | None = None
) -> Float[Array, "*T K"]:
    """The values that are multiplied.

    Args:
        scale: where it is static.
    """
    grouped = x.reshape(*x.shape[:-1], -1, rounding.group or x.shape[-1])
    if not rounding.is_static:
        greatest = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True)
        scale = input_scale(greatest, rounding.code)
    assert scale is not None
    return (_coded(grouped / scale, rounding.code) * scale).reshape(x.shape)


def _coded(x: Float[Array, "*S"], code: str) -> Float[Array, "*S"]:
    if code == "int8":
        # A row's greatest is at 127.5: that is to become 128, whatever division makes of it.
        return jnp.clip(jnp.round(x * _OUTWARD), -128, 127)
    return jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn).astype(jnp.float32)
