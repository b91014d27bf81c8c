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

QUANTISATIONS = {"int8": WeightFormat(8, zero=128), "int4": WeightFormat(4, minima=True)}
"""What float weights can be quantised to."""
_FLOAT_NUMBERS = {np.dtype(jnp.float32): 0, np.dtype(jnp.float16): 1, np.dtype(jnp.bfloat16): 30}
"""GGUF's."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedWeight:
    """A weight matrix [N, K] in tiles.

    Attributes:
        data: bytes that hold the tiles; all weights of a model may share them, as each array
            that a step takes costs the host some microseconds. On the host until
            `Arena.to_device`.
        offset: where in `data` this weight's tiles begin.
        shape: (N, K); rows that fill up the last tile are zero.
        exponent: every value is multiplied by 2 to this power.
    """

    data: UInt8[Array | np.ndarray, " bytes"]
    offset: int = field(metadata={"static": True})
    shape: tuple[int, int] = field(metadata={"static": True})
    format: WeightFormat = field(metadata={"static": True})
    exponent: int = field(default=0, metadata={"static": True})

    @property
    def attributes(self) -> tuple[int, int, int, int, int]:
        """What a native call needs to know beside the data."""
        return (self.offset, self.format.code, *self.shape, self.exponent)

    @property
    def nbytes(self) -> int:
        """Of its own tiles."""
        return self.format.nbytes(*self.shape)

    def _tiles(self) -> UInt8[Array, "tiles tile_bytes"]:
        own = jnp.asarray(self.data)[self.offset : self.offset + self.nbytes]
        return own.reshape(-1, self.format.tile_bytes(self.shape[1]))

    def unpack(self) -> Float[Array, "N K"]:
        """The float32 values, in plain XLA."""
        (N, K), f = self.shape, self.format
        if f.bits > 8:
            kind = jnp.float32 if f.bits == 32 else jnp.bfloat16
            data = self._tiles()[:, : K * TILE * f.bits // 8].reshape(-1, K, TILE, f.bits // 8)
            values = jax.lax.bitcast_convert_type(data, kind).astype(jnp.float32)
        else:
            codes = self.codes()
            if f.table:
                numbers = jnp.asarray(_IQ4, jnp.float32)[codes]
            else:
                numbers = codes.astype(jnp.float32) - (0 if f.minima else f.zero)
            values = numbers * _spread(self.scales(0), f.group)
            if f.minima:
                values += _spread(self.scales(1), f.group)
        values = values.swapaxes(1, 2).reshape(-1, K)[:N]
        return values * jnp.float32(2.0**self.exponent)

    def codes(self) -> UInt8[Array, "tiles K lane"]:
        """Of a quantised weight, 16 rows side by side."""
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
        return codes.reshape(-1, K // 4, TILE, 4).swapaxes(2, 3).reshape(-1, K, TILE)

    def scales(self, which: int) -> Float[Array, "tiles groups lane"]:
        """The scales of a quantised weight (0), or its minima (1), in float32."""
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

        exponent = _exponent(_in_threads(greatest, range(0, N, step)))
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

    def quantise(self, rows: Rows, K: int, name: str) -> PackedWeight:
        """Values [N, K] in float32, float16 or bfloat16, quantised in groups of 32 inputs.

        "int8" has a scale a group, its greatest magnitude / 127. "int4" has a scale and a
        minimum, those with the least squared error among 21 candidates, where larger values
        count for more: as llama.cpp finds them for Q4_K (make_qkx2_quants in ggml-quants.c).
        They are float16; each value gets the code that is nearest to it with them as rounded.

        Goes over the rows twice.

        Args:
            name: of `QUANTISATIONS`.

        Raises:
            ValueError: a value is not finite.
        """
        f, N, lib = QUANTISATIONS[name], len(rows), library()
        step = max(1, BLOCK_WEIGHTS // K // TILE) * TILE

        def values(start: int) -> tuple[ctypes.c_int64, np.ndarray]:
            block = np.ascontiguousarray(rows[start : start + step])
            return ctypes.c_int64(_FLOAT_NUMBERS[block.dtype]), block

        def greatest(start: int) -> float:
            number, block = values(start)
            return lib.llmjax_greatest_magnitude(number, _pointer(block), *_ints(block.size))

        found = _in_threads(greatest, range(0, N, step))
        if not all(map(math.isfinite, found)):
            raise ValueError("it has values that are not finite")
        exponent = _exponent(found)
        offset, out = self._take(N, K, f)

        def fill(start: int) -> None:
            number, block = values(start)
            shape = _ints(len(block), K, f.code, exponent, 0, -(-len(block) // TILE))
            lib.llmjax_quantise(number, _pointer(block), *shape, _pointer(out[start // TILE :]))

        _in_threads(fill, range(0, N, step))
        return PackedWeight(self._bytes, offset, (N, K), f, exponent)

    def to_device(self, weights: Mapping[str, PackedWeight]) -> dict[str, PackedWeight]:
        """The weights packed here, once all are, over one array of the device."""
        data = jax.device_put(self._bytes)  # not jnp.asarray, which copies
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


def quantise(rows: Float[np.ndarray, "N K"], name: str) -> PackedWeight:
    """One weight in an arena of its own; see `Arena.quantise`."""
    arena = Arena(QUANTISATIONS[name].nbytes(*rows.shape))
    return arena.to_device({"": arena.quantise(rows, rows.shape[1], name)})[""]


def _exponent(found: list[float]) -> int:
    """Of the power of two that brings the greatest of these near float16's largest.

    So that small scales keep their bits.
    """
    largest = max(found, default=0.0)
    return max(math.frexp(largest)[1] - 14, -100) if largest > 0 else 0


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
