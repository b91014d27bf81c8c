"""How the other factor of a product is rounded before it is multiplied (W8A8, W4A4).

Rows are rounded one by one, by what is in them or by scales that a checkpoint has: what becomes
of a token does not depend on who else is in the batch.

Sources: compressed-tensors, quantization/lifecycle/forward.py and utils/helpers.py (what
"static", "token" and "group" mean, and its scales); NVFP4: https://arxiv.org/abs/2509.25149;
MX: OCP Microscaling Formats 1.0, with compressed-tensors' rounding of scales; LLM.int8:
Dettmers et al. 2022.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

RANGES = {
    "int4": (-8.0, 7.0),
    "int8": (-128.0, 127.0),
    "fp8_e4m3": (-448.0, 448.0),
    "e2m1": (-6.0, 6.0),
}
"""The least and the greatest value of a code."""
SCALES = ("float32", "e4m3", "e8m0")
_E4M3_MOST = RANGES["fp8_e4m3"][1]


class InputFormat(NamedTuple):
    """What rows are rounded to.

    Attributes:
        code: of `RANGES`; "e2m1" is a float of 4 bits.
        group: consecutive inputs that share a scale; 0 for all of a row.
        reach: the code, not always one that there is, that the greatest magnitude of a group
            becomes: values are divided by the magnitude over this. 0: they are multiplied by
            the greatest code over the magnitude, which rounds otherwise where two are as near.
        static: scale and zero point are the weight's `static_inputs`.
        symmetric: no zero points. Dynamic ones bring the least and the greatest value of a
            group to the least and the greatest code.
        scales: what scales are rounded to: "float32"; "e4m3" times a static factor (NVFP4);
            "e8m0", a power of two (MX).
        threshold: values as great are left as they are (LLM.int8); 0 rounds all.
        axis: of a mesh over whose devices rows are cut: the scale of all of a row is of what all
            of them have. None has rows whole.
    """

    code: str
    group: int = 0
    reach: float = 0.0
    static: bool = False
    symmetric: bool = True
    scales: str = "float32"
    threshold: float = 0.0
    axis: str | None = None

    @property
    def is_plain(self) -> bool:
        """Rows are nothing but codes with a float32 scale for each group."""
        return self.symmetric and self.scales == "float32" and not self.threshold

    @property
    def needs_static(self) -> bool:
        return self.static or self.scales == "e4m3"


def quantise_rows(
    x: Float[Array, "R K"], format: InputFormat, static: Float[Array, " 2"] | None = None
) -> tuple[Shaped[Array, "R K"], Float[Array, "R groups"]]:
    """Codes of rows (int8, or FP8 as bytes), and a float32 scale for each row and group.

    Args:
        format: of "int8" or "fp8_e4m3", and `is_plain`.
        static: scale and zero point, where `format` needs them.
    """
    groups = grouped(x.astype(jnp.float32), format.group)
    scaled, scales = _scaled(groups, format, static)
    numbers = _joined(_nearest(scaled, format.code), x.shape)
    if format.code == "int8":
        return numbers.astype(jnp.int8), scales.T
    return jax.lax.bitcast_convert_type(numbers.astype(jnp.float8_e4m3fn), jnp.uint8), scales.T


def round_rows(
    x: Float[Array, "R K"], format: InputFormat, static: Float[Array, " 2"] | None = None
) -> Float[Array, "R K"]:
    """The float32 values that rows have once they are rounded; arguments as of `quantise_rows`,
    of any format."""
    x = x.astype(jnp.float32)
    kept = jnp.zeros_like(x)
    if format.threshold:
        kept = jnp.where(jnp.abs(x) >= format.threshold, x, 0)
        x = jnp.where(kept == 0, x, 0).astype(jnp.float16).astype(jnp.float32)
    groups = grouped(x, format.group)
    if format.symmetric:
        scaled, scales = _scaled(groups, format, static)
        values = _nearest(scaled, format.code) * scales[..., None]
    else:
        scales, zeros = (part[..., None] for part in _scales_and_zeros(groups, format, static))
        values = (_nearest(_over(groups, scales) + zeros, format.code) - zeros) * scales
    return _joined(values, x.shape) + kept


def grouped(rows: Shaped[Array, "R K"], group: int) -> Shaped[Array, "groups R size"]:
    """Rows cut in groups, the last filled up with zeros; 0 is one group."""
    R, K = rows.shape
    size = group or K
    return jnp.pad(rows, ((0, 0), (0, -K % size))).reshape(R, -1, size).swapaxes(0, 1)


def _joined(groups: Array, shape: tuple[int, ...]) -> Array:
    R, K = shape
    return groups.swapaxes(0, 1).reshape(R, -1)[:, :K]


def _scaled(
    groups: Float[Array, "groups R size"], format: InputFormat, static: Array | None
) -> tuple[Float[Array, "groups R size"], Float[Array, "groups R"]]:
    """Groups over their scales, and these."""
    most = format.reach or RANGES[format.code][1]
    largest = _of_rows(jnp.max(jnp.abs(groups), axis=-1), format)
    if format.static:
        assert static is not None
        scales = jnp.broadcast_to(static[0], largest.shape)
    elif format.scales == "e8m0":
        # The greatest magnitude's power of two, or from 1.75 of it on the next, over that of
        # the greatest code.
        bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
        power = jax.lax.bitcast_convert_type((bits + (1 << 21)) & 0x7F800000, jnp.float32)
        scales = power / 2.0 ** math.floor(math.log2(RANGES[format.code][1]))
        scales = jnp.where(scales == 0, 1.0, scales)
    elif format.scales == "e4m3":
        assert static is not None
        codes = jnp.clip(largest / most * static[0], 0, _E4M3_MOST).astype(jnp.float8_e4m3fn)
        scales = jnp.where(codes == 0, 0.125, codes.astype(jnp.float32)) / static[0]
    elif format.reach:
        scales = _over(largest, jnp.float32(most))
        scales = jnp.where(scales == 0, 1.0, scales)
    else:
        return groups * jnp.where(largest > 1e-30, most / largest, 0)[..., None], largest / most
    return _over(groups, scales[..., None]), scales


def _scales_and_zeros(
    groups: Float[Array, "groups R size"], format: InputFormat, static: Array | None
) -> tuple[Float[Array, "groups R"], Float[Array, "groups R"]]:
    if format.static:
        assert static is not None
        shape = groups.shape[:2]
        return jnp.broadcast_to(static[0], shape), jnp.broadcast_to(static[1], shape)
    least, most = RANGES[format.code]
    low = jnp.minimum(-_of_rows(-jnp.min(groups, axis=-1), format), 0)
    range_ = jnp.maximum(_of_rows(jnp.max(groups, axis=-1), format), 0) - low
    scales = _over(range_, jnp.float32(most - least))
    scales = jnp.where(scales == 0, 1.0, scales)
    return scales, jnp.round(jnp.clip(least - _over(low, scales), least, most))


def _of_rows(largest: Array, format: InputFormat) -> Array:
    """The largest that any device has, where rows are cut."""
    return largest if format.axis is None else jax.lax.pmax(largest, format.axis)


def _over(x: Array, y: Array) -> Array:
    """x / y, rounded as divisions are: XLA would multiply by an inverse where y is the same for
    many, and values that fall between two codes would get the other one."""
    return x / jax.lax.optimization_barrier(jnp.broadcast_to(y, x.shape))


def _nearest(x: Array, code: str) -> Array:
    """The numbers of the nearest codes, to even ones where two are as near."""
    least, most = RANGES[code]
    x = jnp.clip(x, least, most)
    if code == "fp8_e4m3":
        return x.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    if code == "e2m1":
        step = jnp.where(jnp.abs(x) < 2, 0.5, jnp.where(jnp.abs(x) < 4, 1.0, 2.0))
        return jnp.round(x / step) * step
    return jnp.round(x)
