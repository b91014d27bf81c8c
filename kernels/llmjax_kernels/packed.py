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
from jaxtyping import Array, Float, Int, UInt8

from .code_tables import CODE_TABLES
from .host_memory import empty
from .native import library
from .weight_format import (
    GGUF_FORMATS,
    QUANTISATIONS,
    TILE,
    Coding,
    WeightFormat,
    coded_format,
    float_format,
)

BLOCK_WEIGHTS = 1 << 18
"""Weights packed at a time, so that they stay in a core's cache."""
CODED_WEIGHTS = 1 << 20
"""The same of those whose codes checkpoints may have along the outputs, read by long pieces."""
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
        order: where in `data` the order of its inputs is, int32 [K]: place k in the tiles is input
            order[k]; None has them as they are.
    """

    data: UInt8[Array | np.ndarray, " bytes"]
    offset: int = field(metadata={"static": True})
    shape: tuple[int, int] = field(metadata={"static": True})
    format: WeightFormat = field(metadata={"static": True})
    exponent: int = field(default=0, metadata={"static": True})
    order: int | None = field(default=None, metadata={"static": True})

    @property
    def attributes(self) -> tuple[int, int, int, int, int, int]:
        """What a native call needs to know beside the data."""
        order = -1 if self.order is None else self.order
        return (self.offset, self.format.code, *self.shape, self.exponent, order)

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
                numbers = jnp.asarray(CODE_TABLES[f.table].integers, jnp.float32)[codes]
            else:
                numbers = codes.astype(jnp.float32) - f.zero
            values = numbers * _spread(self.scales(0), f.group)
            if f.minima:
                values += _spread(self.scales(1), f.group)
        values = values.swapaxes(1, 2).reshape(-1, K)[:N] * jnp.float32(2.0**self.exponent)
        if self.order is None:
            return values
        stored = jnp.asarray(self.data)[self.order : self.order + 4 * K].reshape(K, 4)
        order = jax.lax.bitcast_convert_type(stored, jnp.int32)
        return jnp.zeros_like(values).at[:, order].set(values)

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


class Arena:
    """Memory for the weights of a model, filled one after the other.

    Args:
        nbytes: of all weights, by `WeightFormat.nbytes`, and of their orders, by `order_nbytes`;
            weights of one order share it.
    """

    def __init__(self, nbytes: int):
        self._bytes = empty((nbytes,), np.dtype(np.uint8))
        self._used = 0
        self._orders: dict[bytes, int] = {}

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

        exponent = exponent_of(max(_in_threads(greatest, range(0, N, step)), default=0))
        offset, out = self._take(N, K, f)

        def fill(start: int) -> None:
            block = np.ascontiguousarray(rows[start : start + step])
            tiles = -(-len(block) // TILE)
            shape = _ints(block.shape[1], len(block), K, f.code, exponent, 0, tiles)
            lib.llmjax_pack_gguf(kind, _pointer(block), *shape, _pointer(out[start // TILE :]))

        _in_threads(fill, range(0, N, step))
        return PackedWeight(self._bytes, offset, (N, K), f, exponent)

    def pack_coded(
        self, rows: Rows, K: int, coding: Coding, order: Int[np.ndarray, " K"] | None = None
    ) -> PackedWeight:
        """Repacks codes of a checkpoint without changing one; scales are rounded to float16.

        Args:
            rows: uint8 [N, bytes]: K codes, then float32 scales, and minima where `coding` has
                them.
            coding: of which `coded_format` gives a format.
            order: the input whose code is at each place; None has them as they are.

        Raises:
            ValueError: a scale is not finite, or `order` no permutation.
        """
        f, N, lib = coded_format(coding, K), len(rows), library()
        assert f is not None
        step = max(1, CODED_WEIGHTS // K // TILE) * TILE
        scales = np.empty((N, 1 + f.minima, K // coding.group), np.float32)
        offset, out = self._take(N, K, f)

        def fill(start: int) -> None:
            block = np.ascontiguousarray(rows[start : start + step])
            shape = _ints(block.shape[1], len(block), K, f.code, -(-len(block) // TILE))
            lib.llmjax_pack_codes(_pointer(block), *shape, _pointer(out[start // TILE :]))
            scales[start : start + step] = _scales_of(block[:, K:], coding, f)

        _in_threads(fill, range(0, N, step))
        greatest = float(np.abs(scales).max(initial=0))
        if not math.isfinite(greatest):
            raise ValueError("it has scales that are not finite")
        exponent = exponent_of(greatest)
        shape = _ints(N, K, f.code, coding.group, exponent, len(out))
        lib.llmjax_pack_scales(_pointer(scales), *shape, _pointer(out))
        place = None if order is None else self._take_order(order, K)
        return PackedWeight(self._bytes, offset, (N, K), f, exponent, place)

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
        exponent = exponent_of(max(found, default=0))
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

    def _take_order(self, order: Int[np.ndarray, " K"], K: int) -> int:
        if not np.array_equal(np.sort(order), np.arange(K)):
            raise ValueError(f"its order of inputs is no permutation of {K}")
        stored = np.ascontiguousarray(order, np.int32).view(np.uint8)
        key = stored.tobytes()
        if key not in self._orders:
            self._orders[key] = self._used
            self._bytes[self._used : self._used + len(stored)] = stored
            self._used += order_nbytes(K)
        return self._orders[key]


def order_nbytes(K: int) -> int:
    """Bytes of an order of K inputs in an arena."""
    return -(-4 * K // 64) * 64


def _scales_of(
    stored: UInt8[np.ndarray, "R bytes"], coding: Coding, f: WeightFormat
) -> Float[np.ndarray, "R P groups"]:
    """A checkpoint's scales and minima as a packed weight has them."""
    floats = np.ascontiguousarray(stored).view(np.float32)
    parts = floats.reshape(len(stored), 1 + coding.minima, -1)
    scale = parts[:, 0] * np.float32(CODE_TABLES[f.table].unit if f.table else 1)
    if not f.minima:
        return scale[:, None]
    minimum = parts[:, 1] if coding.minima else -np.float32(coding.zero) * scale
    return np.stack([scale, minimum + np.float32(f.zero) * scale], axis=1)


def pack_gguf(type_name: str, rows: Rows, K: int) -> PackedWeight:
    """One weight in an arena of its own; see `Arena.pack_gguf`."""
    arena = Arena(GGUF_FORMATS[type_name][1].nbytes(len(rows), K))
    return arena.to_device({"": arena.pack_gguf(type_name, rows, K)})[""]


def pack_coded(
    rows: Rows, K: int, coding: Coding, order: Int[np.ndarray, " K"] | None = None
) -> PackedWeight:
    """One weight in an arena of its own; see `Arena.pack_coded`."""
    f = coded_format(coding, K)
    assert f is not None
    arena = Arena(f.nbytes(len(rows), K) + order_nbytes(K))
    return arena.to_device({"": arena.pack_coded(rows, K, coding, order)})[""]


def pack_float(rows: Float[np.ndarray, "N K"]) -> PackedWeight:
    """One float32 or bfloat16 weight in an arena of its own."""
    arena = Arena(float_format(rows.dtype).nbytes(*rows.shape))
    return arena.to_device({"": arena.pack_float(rows, rows.shape[1], rows.dtype)})[""]


def quantise(rows: Float[np.ndarray, "N K"], name: str) -> PackedWeight:
    """One weight in an arena of its own; see `Arena.quantise`."""
    arena = Arena(QUANTISATIONS[name].nbytes(*rows.shape))
    return arena.to_device({"": arena.quantise(rows, rows.shape[1], name)})[""]


def exponent_of(greatest: float) -> int:
    """Of the power of two that brings a greatest scale near float16's largest.

    So that small scales keep their bits.
    """
    return max(math.frexp(greatest)[1] - 14, -100) if greatest > 0 else 0


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
