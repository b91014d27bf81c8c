"""From the blocks of a GGUF tensor to weights for GPUs."""

from __future__ import annotations

import ctypes
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ..code_tables import CODE_TABLES
from ..gguf_quantise import BLOCKS
from ..native import library
from ..packed import BLOCK_WEIGHTS, Rows, _in_threads, _ints, _pointer
from ..weight_format import GGUF_FORMATS, WeightFormat, gguf_format
from .weight import QuantFormat, QuantWeight, make_weight


def gguf_quant_format(type_name: str, K: int) -> QuantFormat | None:
    """How a GGUF tensor of this type stays for GPUs; None where no kernel reads it so.

    Integers of up to 4 bits are "int4", wider ones and those of tables "int8". Scales are what
    the file has: a block's float16, or the integers of its groups and the block's unit.
    """
    packed = gguf_format(type_name, K)
    if packed is None:
        return None
    size, _ = BLOCKS[type_name]
    span = size if size > packed.group else 0
    if packed.bits > 4 or packed.table is not None:
        return QuantFormat("int8", packed.group, packed.minima, span=span)
    return QuantFormat("int4", packed.group, packed.minima, zero=packed.zero, span=span)


def from_gguf(type_name: str, rows: Rows, K: int) -> QuantWeight:
    """A weight of a GGUF tensor's codes and scales; nothing is rounded.

    Args:
        type_name: of which `gguf_quant_format` gives a format.
        rows: as stored, uint8 [N, bytes of a row].

    Raises:
        ValueError: a scale is not finite.
        OSError: the native library, which takes blocks apart, is not there.
    """
    (number, packed), format = GGUF_FORMATS[type_name], gguf_quant_format(type_name, K)
    assert format is not None
    N, parts, (size, _), lib = len(rows), 1 + packed.minima, BLOCKS[type_name], library()
    codes = np.empty((N, K), np.uint8)
    scales = np.empty((N, parts, K // packed.group), np.int8)
    units = np.empty((N, parts, K // size), np.float16)
    step = max(1, BLOCK_WEIGHTS // K)

    def fill(start: int) -> None:
        block = np.ascontiguousarray(rows[start : start + step])
        shape = _ints(block.shape[1], len(block), K, packed.group, parts)
        out = [_pointer(array[start:]) for array in (codes, scales, units)]
        lib.llmjax_gguf_parts(ctypes.c_int64(number), _pointer(block), *shape, *out)

    _in_threads(fill, range(0, N, step))
    if not np.isfinite(units).all():
        raise ValueError("it has scales that are not finite")
    return _laid_out(codes, scales, units, packed, format)


@partial(jax.jit, static_argnums=(3, 4))
def _laid_out(
    codes: jax.Array,
    scales: jax.Array,
    units: jax.Array,
    packed: WeightFormat,
    format: QuantFormat,
) -> QuantWeight:
    if packed.table is not None:
        codes = jnp.asarray(CODE_TABLES[packed.table].integers, jnp.int8)[codes]
    elif format.code == "int8":
        codes = jax.lax.bitcast_convert_type(codes - np.uint8(packed.zero), jnp.int8)
    units = jnp.moveaxis(units, 0, 2)
    # Without spans each group is a block, and the unit its scale.
    parts = jnp.moveaxis(scales, 0, 2) if format.span else units
    minima = parts[1] if format.minima else None
    spans = units if format.span else None
    return make_weight(codes, parts[0], format, minima=minima, units=spans)
