"""Weights as the native kernels stream them: tiles of 16 rows, quantised or not.

The layout of a tile is described in native/src/format.h, which the kernels read. Here it is
made from checkpoints and taken apart again.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from os import cpu_count
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from .host_memory import empty
from .native import library

TILE = 16
BLOCK_WEIGHTS = 1 << 18
"""Weights packed at a time, so that they stay in a core's cache."""
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class WeightFormat:
    """How a value is stored: code * scale + minimum, or (code - zero) * scale.

    Attributes:
        bits: of a code; 16 and 32 are bfloat16 and float32 values as they are.
        group: consecutive inputs that share a scale (and a minimum).
        zero: the code of 0 where there are no minima.
        minima: whether groups have minima.
        table: codes stand for IQ4_NL's 16 values.
    """

    bits: int
    group: int = 32
    zero: int = 0
    minima: bool = False
    table: bool = False

    @property
    def code(self) -> int:
        """As the kernels take it."""
        flags = self.minima | self.table << 1
        return self.bits | self.group << 8 | self.zero << 16 | flags << 24

    def tile_bytes(self, K: int) -> int:
        scales = K // self.group * 32 * (1 + self.minima) if self.bits <= 8 else 0
        return -(-(K * TILE * self.bits // 8 + scales) // 64) * 64


FLOAT32, BFLOAT16 = WeightFormat(32), WeightFormat(16)

GGUF_FORMATS: dict[str, tuple[int, WeightFormat]] = {
    "Q4_0": (2, WeightFormat(4, zero=8)),
    "Q4_1": (3, WeightFormat(4, minima=True)),
    "Q5_0": (6, WeightFormat(5, zero=16)),
    "Q5_1": (7, WeightFormat(5, minima=True)),
    "Q8_0": (8, WeightFormat(8, zero=128)),
    "Q2_K": (10, WeightFormat(4, 16, minima=True)),
    "Q3_K": (11, WeightFormat(4, 16, zero=4)),
    "Q4_K": (12, WeightFormat(4, minima=True)),
    "Q5_K": (13, WeightFormat(5, minima=True)),
    "Q6_K": (14, WeightFormat(6, 16, zero=32)),
    "IQ4_NL": (20, WeightFormat(4, zero=128, table=True)),
    "IQ4_XS": (23, WeightFormat(4, zero=128, table=True)),
}
"""The number and the packed format of each GGUF type that stays quantised."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedWeight:
    """A weight matrix [N, K] in tiles.

    Attributes:
        data: the tiles' bytes.
        shape: (N, K); rows that fill up the last tile are zero.
        exponent: every value is multiplied by 2 to this power.
    """

    data: UInt8[Array, "tiles tile_bytes"]
    shape: tuple[int, int] = field(metadata={"static": True})
    format: WeightFormat = field(metadata={"static": True})
    exponent: int = field(default=0, metadata={"static": True})

    @property
    def attributes(self) -> tuple[int, int, int, int]:
        """What a native call needs to know beside the data."""
        return (self.format.code, *self.shape, self.exponent)

    def __getitem__(self, index: Any) -> Array:
        """The values, as of a plain array: what readers of a model's weights see."""
        return self.unpack()[index]

    @property
    def dtype(self) -> np.dtype:
        """Of the values that indexing gives."""
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def unpack(self) -> Float[Array, "N K"]:
        """The float32 values, in plain XLA."""
        (N, K), f = self.shape, self.format
        if f.bits > 8:
            kind = jnp.float32 if f.bits == 32 else jnp.bfloat16
            data = self.data[:, : K * TILE * f.bits // 8].reshape(-1, K, TILE, f.bits // 8)
            values = jax.lax.bitcast_convert_type(data, kind).astype(jnp.float32)
        else:
            values = self._codes() * _spread(self._scales(0), f.group)
            if f.minima:
                values += _spread(self._scales(1), f.group)
        values = values.swapaxes(1, 2).reshape(-1, K)[:N]
        return values * jnp.float32(2.0**self.exponent)

    def _codes(self) -> Float[Array, "tiles K lane"]:
        K, f = self.shape[1], self.format
        vectors = self.data[:, : K * TILE * f.bits // 8].reshape(-1, K // 32, f.bits, 64)
        if f.bits < 8:
            low = jnp.stack([vectors[:, :, :4] & 15, vectors[:, :, :4] >> 4], 3)
            codes = low.reshape(-1, K // 32, 8, 64)
            if upper_bits := f.bits - 4:
                planes = jnp.repeat(vectors[:, :, 4:], 8 // upper_bits, axis=2)
                shift = jnp.arange(8, dtype=jnp.uint8) % (8 // upper_bits) * upper_bits
                upper = planes >> shift[:, None] & (2**upper_bits - 1)
                codes |= upper << 4
        else:
            codes = vectors
        # Each vector is 16 lanes of 4 consecutive k.
        codes = codes.reshape(-1, K // 4, TILE, 4).swapaxes(2, 3).reshape(-1, K, TILE)
        if f.table:
            return jnp.asarray(_IQ4, jnp.float32)[codes]
        return codes.astype(jnp.float32) - (0 if f.minima else f.zero)

    def _scales(self, which: int) -> Float[Array, "tiles groups lane"]:
        K, f = self.shape[1], self.format
        groups = K // f.group
        start = K * TILE * f.bits // 8 + which * groups * 32
        data = self.data[:, start : start + groups * 32].reshape(-1, groups, TILE, 2)
        return jax.lax.bitcast_convert_type(data, jnp.float16).astype(jnp.float32)


class Rows(Protocol):
    """A matrix by slices of rows: an array, or what reads them as they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


def packs_gguf(type_name: str, K: int) -> bool:
    """Whether a GGUF tensor of this type can stay quantised."""
    return type_name in GGUF_FORMATS and K % 32 == 0


def pack_gguf(type_name: str, rows: Rows, K: int) -> PackedWeight:
    """Repacks a GGUF tensor's rows without changing a code; scales are rounded to float16.

    Goes over the rows twice.

    Args:
        rows: as stored, uint8 [N, bytes of a row].
    """
    number, f = GGUF_FORMATS[type_name]
    N, lib, kind = len(rows), library(), ctypes.c_int64(number)
    step = max(1, BLOCK_WEIGHTS // K // TILE) * TILE

    def greatest(start: int) -> float:
        block = np.ascontiguousarray(rows[start : start + step])
        shape = _ints(block.shape[1], K, 0, len(block))
        return lib.llmjax_greatest_scale(kind, _pointer(block), *shape, ctypes.c_bool(f.minima))

    largest = max(_in_threads(greatest, range(0, N, step)), default=0.0)
    # The greatest scale comes near float16's largest, to keep the small ones exact.
    exponent = math.frexp(largest)[1] - 14 if largest > 0 else 0
    out = _empty_tiles(N, K, f)

    def fill(start: int) -> None:
        block = np.ascontiguousarray(rows[start : start + step])
        shape = _ints(block.shape[1], len(block), K, f.code, exponent, 0, -(-len(block) // TILE))
        lib.llmjax_pack_gguf(kind, _pointer(block), *shape, _pointer(out[start // TILE :]))

    _in_threads(fill, range(0, N, step))
    return PackedWeight(jnp.asarray(out), (N, K), f, exponent)


class FloatPacker:
    """Tiles of float32 or bfloat16 values, filled by blocks of rows."""

    def __init__(self, shape: tuple[int, int], dtype: np.dtype):
        self._shape, self._dtype = shape, np.dtype(dtype)
        self._format = FLOAT32 if self._dtype.itemsize == 4 else BFLOAT16
        self._out = _empty_tiles(*shape, self._format)

    def add(self, start: int, values: Float[np.ndarray, "rows K"]) -> None:
        """Rows from `start` on, a multiple of TILE; so is their number but at the end."""
        values = np.ascontiguousarray(values.astype(self._dtype, copy=False))
        N, K = values.shape
        shape = _ints(self._dtype.itemsize, N, K, 0, -(-N // TILE))
        tiles = self._out[start // TILE :]
        library().llmjax_pack_float(_pointer(values), *shape, _pointer(tiles))

    def done(self) -> PackedWeight:
        return PackedWeight(jnp.asarray(self._out), self._shape, self._format)


def _spread(groups: Array, size: int) -> Array:
    return jnp.repeat(groups, size, axis=1)


def _empty_tiles(N: int, K: int, f: WeightFormat) -> UInt8[np.ndarray, "tiles tile_bytes"]:
    return empty((-(-N // TILE), f.tile_bytes(K)), np.dtype(np.uint8))


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _ints(*values: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(v) for v in values]


def _in_threads(work: Callable[[int], Any], starts: range) -> list[Any]:
    """On all cores; ctypes lets go of the GIL."""
    with ThreadPoolExecutor(cpu_count()) as threads:
        return list(threads.map(work, starts))
