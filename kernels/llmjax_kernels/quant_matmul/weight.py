"""Weight matrices [N, K] as quantised codes and scales, laid out for GPUs.

Codes lie group by group, [groups, N, inputs of a group]: a program takes many rows of a group at
a time, which share nothing but are neighbours, so that it reads long pieces, and has one scale a
row for them. Scales lie [groups, N], as GPTQ and AWQ have them. A byte of int4 is two consecutive
inputs, the first in its low half. Where scales are integers themselves (GGUF's K quants), units by
which they are multiplied lie [spans, N].
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, Integer, Shaped

from ..packed import PackedWeight
from .inputs import InputFormat, grouped, quantise_rows

SMALLEST_GROUP = 16
SMALLEST_GROUP_OF_CODES = 32
"""Where codes are multiplied by codes: matrix units take no fewer bytes."""


class QuantFormat(NamedTuple):
    """What codes mean: (code - zero) * scale, plus a minimum where there is one.

    Attributes:
        code: "int4" (0 to 15), "int8" (-128 to 127) or "fp8_e4m3".
        group: consecutive inputs that share a scale; 0 for all of a row. One scale for a whole
            matrix, or for a block of rows, is repeated for each row.
        minima: whether groups have minima. A zero point z is the minimum -z * scale.
        inputs: what the other factor is rounded to; None leaves it.
        zero: of int4, the code of 0.
        span: consecutive inputs, some groups of them, that share a unit of their scales and one of
            their minima, which are integers from -128 to 127; 0 has scales as they are.
    """

    code: str
    group: int = 0
    minima: bool = False
    inputs: InputFormat | None = None
    zero: int = 0
    span: int = 0

    @property
    def of_codes(self) -> bool:
        """Codes may be multiplied by codes: those of the inputs are of the same kind, and their
        scales are of the same groups."""
        x = self.inputs
        if x is None or self.minima or self.span or self.code not in ("int8", "fp8_e4m3"):
            return False
        fits = x.group == self.group and (not x.group or x.group >= SMALLEST_GROUP_OF_CODES)
        return x.is_plain and x.code == self.code and fits

    def codes_shape(self, N: int, K: int) -> tuple[int, int, int]:
        """Of the array of codes: groups, rows, bytes of a group in a row."""
        size = self.group or K
        return -(-K // size), N, -(-size // 2) if self.code == "int4" else size

    def units_shape(self, N: int, K: int) -> tuple[int, int, int] | None:
        """Of the array of units: parts, spans, rows; None where there are no spans."""
        return (1 + self.minima, -(-K // self.span), N) if self.span else None

    @property
    def code_dtype(self) -> np.dtype:
        """Of the array of codes; FP8 as bytes, for which every GPU has instructions."""
        return np.dtype(np.int8 if self.code == "int8" else np.uint8)

    @property
    def scale_dtype(self) -> np.dtype:
        """FP8's, and where inputs are rounded, are as given; those of whole rows are few, and may
        be as fine as they like."""
        if self.span:
            return np.dtype(np.int8)
        small = self.group and self.code != "fp8_e4m3" and self.inputs is None
        return np.dtype(np.float16 if small else np.float32)


FORMATS = {
    "int4": QuantFormat("int4", 32, minima=True),
    "int8": QuantFormat("int8", 32),
    "fp8": QuantFormat("fp8_e4m3"),
}
"""By the names of `--quantization`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantWeight:
    """A weight matrix [N, K].

    Attributes:
        codes: see above; where the last group is not full it ends in zeros.
        scales: the scales, and behind them the minima where there are any (P = 2).
        shape: (N, K).
        exponent: every value is multiplied by 2 to this power, which brings small scales into
            float16's range.
        units: what the scales of a span are multiplied by, and what its minima, in float16; None
            where `format` has no spans.
        order: the input that is at each place of `codes`; None has them as they are.
        static_inputs: scale and zero point of the inputs, where these need them (of NVFP4, what
            scales are multiplied by before they are rounded, and nothing).
        layout: of the matrix [N, K] over several devices, as one of floats would have it; see
            divided.py. None has it on one.
    """

    codes: Shaped[Array, "groups N bytes"]
    scales: Shaped[Array, "P groups N"]
    shape: tuple[int, int] = field(metadata={"static": True})
    format: QuantFormat = field(metadata={"static": True})
    exponent: int = field(default=0, metadata={"static": True})
    units: Float[Array, "P spans N"] | None = None
    order: Int[Array, " K"] | None = None
    static_inputs: Float[Array, " 2"] | None = None
    layout: NamedSharding | None = field(default=None, metadata={"static": True})

    @property
    def nbytes(self) -> int:
        units = 0 if self.units is None else self.units.nbytes
        return self.codes.nbytes + self.scales.nbytes + units

    def dequantise(self) -> Float[Array, "N K"]:
        """The float32 values."""
        return _values(self, self.codes, self.scales, self.units)

    def rows(self, ids: Int[Array, " R"]) -> Float[Array, "R K"]:
        """The float32 values of some rows, of a weight on one device."""
        units = None if self.units is None else self.units[:, :, ids]
        return _values(self, self.codes[:, ids], self.scales[:, :, ids], units)


def _values(weight: QuantWeight, codes: Array, scales: Array, units: Array | None) -> Array:
    format, scales = weight.format, scales.astype(jnp.float32)
    if units is not None:
        each = jnp.repeat(units.astype(jnp.float32), format.span // format.group, axis=1)
        scales *= each[:, : scales.shape[1]]
    values = numbers(codes, format) * scales[0, :, :, None]
    if format.minima:
        values += scales[1, :, :, None]
    values = jnp.swapaxes(values, 0, 1).reshape(codes.shape[1], -1)[:, : weight.shape[1]]
    values *= jnp.float32(2.0**weight.exponent)
    if weight.order is None:
        return values
    return jnp.zeros_like(values).at[:, weight.order].set(values)


def numbers(
    codes: Shaped[Array, "groups R bytes"], format: QuantFormat
) -> Float[Array, "groups R size"]:
    """What codes stand for before they are scaled."""
    if format.code == "int4":
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], -1)
    if format.code == "fp8_e4m3":
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return codes.astype(jnp.float32) - format.zero


def make_weight(
    codes: Integer[Array, "N K"],
    scales: Shaped[Array, "groups N"],
    format: QuantFormat,
    *,
    minima: Shaped[Array, "groups N"] | None = None,
    units: Float[Array, "P spans N"] | None = None,
    exponent: int = 0,
    static_inputs: Float[Array, " 2"] | None = None,
) -> QuantWeight:
    """A weight of codes and scales that are known, of a checkpoint's say.

    Args:
        codes: one a place; of FP8 as bytes.
        minima: where `format` has them.
        units: of scales, and of minima, where `format` has spans.
        static_inputs: where `format.inputs` needs them.

    Raises:
        ValueError: shapes do not fit one another, groups are not whole blocks, or spans no whole
            groups.
    """
    N, K = codes.shape
    groups, _, _ = format.codes_shape(N, K)
    parts = [scales] if minima is None else [scales, minima]
    if (minima is not None) != format.minima or any(x.shape != (groups, N) for x in parts):
        raise ValueError(
            f"scales {[x.shape for x in parts]}, expected {1 + format.minima} of {(groups, N)} "
            f"for codes [{N}, {K}] of {format}"
        )
    found, expected = None if units is None else units.shape, format.units_shape(N, K)
    if found != expected:
        raise ValueError(f"units {found}, expected {expected} for codes [{N}, {K}] of {format}")
    if format.group % SMALLEST_GROUP:
        raise ValueError(f"groups of {format.group}, allowed: multiples of {SMALLEST_GROUP}")
    if format.span and (not format.group or format.span % format.group):
        raise ValueError(f"spans of {format.span}, allowed: multiples of groups ({format.group})")
    if format.zero and format.code != "int4":
        raise ValueError(f"zero is {format.zero}, allowed for {format.code}: 0")
    needed = format.inputs is not None and format.inputs.needs_static
    if needed != (static_inputs is not None):
        raise ValueError(f"static inputs are {'missing' if needed else 'given'} for {format}")
    codes = grouped(codes.astype(format.code_dtype), format.group)
    if format.code == "int4":
        codes = jnp.pad(codes, ((0, 0), (0, 0), (0, codes.shape[2] % 2)))
        codes = codes[:, :, ::2] | codes[:, :, 1::2] << 4
    scales = jnp.stack(parts).astype(format.scale_dtype)
    made = QuantWeight(codes, scales, (N, K), format, exponent, static_inputs=static_inputs)
    return made if units is None else replace(made, units=units.astype(jnp.float16))


def weight_shapes(N: int, K: int, format: QuantFormat) -> QuantWeight:
    """A weight without its arrays, to compile for."""
    groups, _, _ = shape = format.codes_shape(N, K)
    of_units = format.units_shape(N, K)

    def zeros() -> QuantWeight:
        codes = jnp.zeros(shape, format.code_dtype)
        scales = jnp.zeros((1 + format.minima, groups, N), format.scale_dtype)
        static = jnp.zeros(2) if format.inputs is not None and format.inputs.needs_static else None
        units = jnp.zeros(of_units, jnp.float16) if of_units else None
        return QuantWeight(codes, scales, (N, K), format, static_inputs=static, units=units)

    return jax.eval_shape(zeros)


def from_packed(weight: PackedWeight) -> QuantWeight:
    """What `quantization` makes for CPUs, in the layout of GPUs: the same codes and scales.

    Args:
        weight: of a format in `packed.QUANTISATIONS`.
    """
    # Exponents differ from weight to weight: nothing is to be compiled for each.
    laid_out = _laid_out(replace(weight, exponent=0))
    return replace(laid_out, exponent=weight.exponent)


@jax.jit
def _laid_out(weight: PackedWeight) -> QuantWeight:
    (N, K), f = weight.shape, weight.format
    codes = weight.codes().swapaxes(1, 2).reshape(-1, K)[:N]
    parts = [
        jnp.moveaxis(weight.scales(i), 1, 0).reshape(K // f.group, -1)[:, :N]
        for i in range(1 + f.minima)
    ]
    if f.bits == 8:
        codes = jax.lax.bitcast_convert_type(codes ^ f.zero, jnp.int8)
    format = FORMATS[f"int{f.bits}"]
    minima = parts[1] if f.minima else None
    return make_weight(codes, parts[0], format, minima=minima)


def quantise_weight(values: Float[Array, "N K"], format: QuantFormat) -> QuantWeight:
    """The nearest codes under scales that make the greatest magnitude of a group the greatest
    code; of "int8" and "fp8_e4m3"."""
    codes, scales = quantise_rows(values, InputFormat(format.code, format.group))
    return make_weight(codes, scales.T, format)
