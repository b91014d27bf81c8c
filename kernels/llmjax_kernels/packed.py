"""Weights as the native kernels stream them: tiles of 16 rows, quantised or not.

The layout of a tile is described in native/src/format.h, which the kernels read. Here it is
made from checkpoints and taken apart again.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
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

    def nbytes(self, N: int, K: int) -> int:
        """Bytes of a weight [N, K]."""
        return -(-N // TILE) * self.tile_bytes(K)


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
        data: bytes that hold the tiles; all weights of a model may share them, as each array
            that a step takes costs the host some microseconds.
        offset: where in `data` this weight's tiles begin.
        shape: (N, K); rows that fill up the last tile are zero.
        exponent: every value is multiplied by 2 to this power.
    """

    data: UInt8[Array, " bytes"]
    offset: int = field(metadata={"static": True})
    shape: tuple[int, int] = field(metadata={"static": True})
    format: WeightFormat = field(metadata={"static": True})
    exponent: int = field(default=0, metadata={"static": True})

    @property
    def attributes(self) -> tuple[int, int, int, int, int]:
        """What a native call needs to know beside the data."""
        return (self.offset, self.format.code, *self.shape, self.exponent)

    def __getitem__(self, index: Any) -> Array:
        """The values, as of a plain array: what readers of a model's weights see."""
        return self.unpack()[index]

    @property
    def dtype(self) -> np.dtype:
        """Of the values that indexing gives."""
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Of its own tiles."""
        return self.format.nbytes(*self.shape)

    def _tiles(self) -> UInt8[Array, "tiles tile_bytes"]:
        own = self.data[self.offset : self.offset + self.nbytes]
        return own.reshape(-1, self.format.tile_bytes(self.shape[1]))

    def unpack(self) -> Float[Array, "N K"]:
        """The float32 values, in plain XLA."""
        (N, K), f = self.shape, self.format
        if f.bits > 8:
            kind = jnp.float32 if f.bits == 32 else jnp.bfloat16
            data = self._tiles()[:, : K * TILE * f.bits // 8].reshape(-1, K, TILE, f.bits // 8)
            values = jax.lax.bitcast_convert_type(data, kind).astype(jnp.float32)
        else:
            values = self._codes() * _spread(self._scales(0), f.group)
            if f.minima:
                values += _spread(self._scales(1), f.group)
        values = values.swapaxes(1, 2).reshape(-1, K)[:N]
        return values * jnp.float32(2.0**self.exponent)

    def _codes(self) -> Float[Array, "tiles K lane"]:
        K, f = self.shape[1], self.format
        vectors = self._tiles()[:, : K * TILE * f.bits // 8].reshape(-1, K // 32, f.bits, 64)
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
        data = self._tiles()[:, start : start + groups * 32].reshape(-1, groups, TILE, 2)
        return jax.lax.bitcast_convert_type(data, jnp.float16).astype(jnp.float32)


class Rows(Protocol):
    """A matrix by slices of rows: an array, or what reads them as they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


def gguf_format(type_name: str, K: int) -> WeightFormat | None:
    """How a GGUF tensor of this type stays quantised; None where it cannot."""
    return GGUF_FORMATS[type_name][1] if type_name in GGUF_FORMATS and K % 32 == 0 else None


def float_format(dtype: np.dtype) -> WeightFormat:
    """Tiles of float32 or bfloat16 values."""
    return FLOAT32 if np.dtype(dtype).itemsize == 4 else BFLOAT16


class Arena:
    """Memory for the weights of a model, filled one after the other.

    Args:
        nbytes: of all weights, by `WeightFormat.nbytes`.
    """

    def __init__(self, nbytes: int):
        self._bytes = empty((nbytes,), np.dtype(np.uint8))
        self._used = 0

    def pack_gguf(self, type_name: str, rows: Rows, K: int) -> PackedWeight:
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
        offset, out = self._take(N, K, f)

        def fill(start: int) -> None:
            block = np.ascontiguousarray(rows[start : start + step])
            tiles = -(-len(block) // TILE)
            shape = _ints(block.shape[1], len(block), K, f.code, exponent, 0, tiles)
            lib.llmjax_pack_gguf(kind, _pointer(block), *shape, _pointer(out[start // TILE :]))

        _in_threads(fill, range(0, N, step))
        return PackedWeight(self._bytes, offset, (N, K), f, exponent)

    def pack_float(self, rows: Rows, K: int, dtype: np.dtype) -> PackedWeight:
        """Float values [N, K], rounded to float32 or bfloat16."""
        N, lib, f = len(rows), library(), float_format(dtype)
        step = max(1, BLOCK_WEIGHTS // K // TILE) * TILE
        offset, out = self._take(N, K, f)

        def fill(start: int) -> None:
            block = np.ascontiguousarray(rows[start : start + step].astype(dtype, copy=False))
            shape = _ints(np.dtype(dtype).itemsize, len(block), K, 0, -(-len(block) // TILE))
            lib.llmjax_pack_float(_pointer(block), *shape, _pointer(out[start // TILE :]))

        _in_threads(fill, range(0, N, step))
        return PackedWeight(self._bytes, offset, (N, K), f)

    def to_device(self, weights: Mapping[str, PackedWeight]) -> dict[str, PackedWeight]:
        """The weights packed here, once all are, over one array of the device."""
        data = jnp.asarray(self._bytes)
        return {name: replace(weight, data=data) for name, weight in weights.items()}

    def _take(self, N: int, K: int, f: WeightFormat) -> tuple[int, UInt8[np.ndarray, "tiles b"]]:
        offset, nbytes = self._used, f.nbytes(N, K)
        self._used += nbytes
        return offset, self._bytes[offset : self._used].reshape(-1, f.tile_bytes(K))


def pack_gguf(type_name: str, rows: Rows, K: int) -> PackedWeight:
    """One weight in an arena of its own; see `Arena.pack_gguf`."""
    arena = Arena(GGUF_FORMATS[type_name][1].nbytes(len(rows), K))
    return arena.to_device({"": arena.pack_gguf(type_name, rows, K)})[""]


def pack_float(rows: Float[np.ndarray, "N K"]) -> PackedWeight:
    """One float32 or bfloat16 weight in an arena of its own."""
    arena = Arena(float_format(rows.dtype).nbytes(*rows.shape))
    return arena.to_device({"": arena.pack_float(rows, rows.shape[1], rows.dtype)})[""]


def _spread(groups: Array, size: int) -> Array:
    return jnp.repeat(groups, size, axis=1)


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _ints(*values: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(v) for v in values]


def _in_threads(work: Callable[[int], Any], starts: range) -> list[Any]:
    """On all cores; ctypes lets go of the GIL."""
    with ThreadPoolExecutor(cpu_count()) as threads:
        return list(threads.map(work, starts))
