"""From the codes of a checkpoint to weights for GPUs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from ..code_tables import CODE_TABLES
from ..packed import exponent_of
from ..weight_format import Coding
from .weight import SMALLEST_GROUP, QuantFormat, QuantWeight, make_weight


def quant_format(coding: Coding, K: int) -> QuantFormat | None:
    """How codes stay for GPUs; None where no kernel reads them so.

    Integers of up to 4 bits are "int4", wider ones "int8", and so are the integers of
    `CODE_TABLES`, at 8 bits. E4M3 is as it is.
    """
    group = 0 if coding.group == K else coding.group
    if group % SMALLEST_GROUP:
        return None
    if coding.table == "e4m3":
        return None if coding.minima else QuantFormat("fp8_e4m3", group)
    if coding.table is not None:
        known = coding.table in CODE_TABLES and not coding.minima
        return QuantFormat("int8", group) if known else None
    if coding.bits <= 4:
        return QuantFormat("int4", group, minima=True)
    minima = coding.minima or coding.zero != 128
    return QuantFormat("int8", group, minima=minima) if coding.bits <= 8 else None


def from_coded(
    rows: UInt8[np.ndarray, "N bytes"],
    K: int,
    coding: Coding,
    format: QuantFormat,
    order: Int[np.ndarray, " K"] | None = None,
    static_inputs: Float[Array, " 2"] | None = None,
    exponent: int | None = None,
) -> QuantWeight:
    """A weight of the codes, scales and minima of a checkpoint; see `Arena.pack_coded`.

    Args:
        format: what `quant_format` gives, or that with rounded inputs.
        static_inputs: see `QuantWeight`.
        exponent: what `coded_exponent` gives of all of a matrix of which these are a part; None
            is that of these rows.

    Raises:
        ValueError: a scale is not finite.
    """
    scales, minima = _scales_and_minima(rows, K, coding, format)
    if exponent is None:
        exponent = coded_exponent(rows, K, coding, format)
    table = CODE_TABLES.get(coding.table or "")
    factor = np.float32(2.0**-exponent)
    weight = _made(
        rows[:, :K],
        scales.T * factor,
        None if minima is None else minima.T * factor,
        table and table.integers,
        format,
        static_inputs,
    )
    # Exponents differ from weight to weight: nothing is to be compiled for each.
    places = None if order is None else jnp.asarray(order, jnp.int32)
    return replace(weight, exponent=exponent, order=places)


def coded_exponent(
    rows: UInt8[np.ndarray, "N bytes"], K: int, coding: Coding, format: QuantFormat
) -> int:
    """`QuantWeight.exponent` of a matrix; arguments as of `from_coded`, of which codes (K) may be
    left out.

    Raises:
        ValueError: a scale is not finite.
    """
    parts = _scales_and_minima(rows, K, coding, format)
    greatest = max(float(np.abs(x).max(initial=0)) for x in parts if x is not None)
    if not math.isfinite(greatest):
        raise ValueError("it has scales that are not finite")
    return exponent_of(greatest) if format.scale_dtype == np.float16 else 0


def _scales_and_minima(
    rows: UInt8[np.ndarray, "N bytes"], K: int, coding: Coding, format: QuantFormat
) -> tuple[Float[np.ndarray, "N groups"], Float[np.ndarray, "N groups"] | None]:
    """As `format` has them, but for the exponent."""
    floats = np.ascontiguousarray(rows[:, K:]).view(np.float32)
    parts = floats.reshape(len(rows), 1 + coding.minima, -1)
    scales = parts[:, 0]
    if coding.table in CODE_TABLES:
        scales = scales * np.float32(CODE_TABLES[coding.table].unit)
    if not format.minima:
        return scales, None
    minimum = parts[:, 1] if coding.minima else -np.float32(coding.zero) * scales
    return scales, minimum + np.float32(128) * scales if format.code == "int8" else minimum


@partial(jax.jit, static_argnums=(3, 4))
def _made(
    codes: jax.Array,
    scales: jax.Array,
    minima: jax.Array | None,
    integers: tuple[int, ...] | None,
    format: QuantFormat,
    static_inputs: jax.Array | None,
) -> QuantWeight:
    if integers is not None:
        codes = jnp.asarray(integers, jnp.int8)[codes]
    elif format.code == "int8":
        codes = jax.lax.bitcast_convert_type(codes ^ np.uint8(128), jnp.int8)
    return make_weight(codes, scales, format, minima=minima, static_inputs=static_inputs)
