"""Matrices whose codes lie in rows, and the numbers that blocks of them share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import gcd

import numpy as np
from jaxtyping import Float, Int, UInt8

from .base import Coding, Inputs, QuantisedMatrix, Tensor, Tensors
from .integers import nibbles, widened
from .layers import FLOATS, require_tensor

E8M0_TYPES = ("U8", "F8_E8M0")
"""An exponent a scale; its bias is 127."""


@dataclass(frozen=True)
class Grid:
    """Numbers of a matrix [N, K] that are the same all over a block of it.

    Attributes:
        read: (start, stop) -> float32 rows of them, one number a block.
        block: rows and inputs of a block; the last ones may be cut short.
    """

    read: Callable[[int, int], np.ndarray]
    block: tuple[int, int]
    K: int

    @property
    def group(self) -> int:
        """Consecutive inputs that share a number, and divide the row."""
        return gcd(self.block[1], self.K) if self.block[1] < self.K else self.K

    def rows(self, start: int, stop: int) -> Float[np.ndarray, "R groups"]:
        """The numbers of each row [start:stop], for each `group` of its inputs."""
        height, width = self.block
        first = start // height
        stored = self.read(first, -(-stop // height))
        columns = np.arange(0, self.K, self.group) // width
        return stored[np.arange(start, stop)[:, None] // height - first, columns[None, :]]


def require_grid(
    tensors: Tensors,
    layer: str,
    part: str,
    shape: tuple[int, int],
    block: tuple[int, int],
    types: Collection[str] = FLOATS,
    convert: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Grid:
    """The numbers of a layer's blocks.

    Args:
        shape: of the matrix.
        block: rows and inputs that share a number.
        types: allowed, by the file's names.
        convert: from what is stored to float32; by default, as it is.

    Raises:
        CheckpointFormatError: the tensor is missing, or has another shape or type.
    """
    counts = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    stored = tensors.get(f"{layer}.{part}")
    flat = [() if counts == (1, 1) else None, (counts[0],) if counts[1] == 1 else None]
    fits = stored is not None and stored.shape in flat
    found = require_tensor(tensors, layer, part, stored.shape if fits and stored else counts, types)

    def read(start: int, stop: int) -> np.ndarray:
        values = found.read() if not found.shape else found.rows(start, stop)
        values = values.reshape(-1, counts[1])
        return np.asarray(convert(values) if convert else values, np.float32)

    return Grid(read, block, shape[1])


def require_scalar(
    tensors: Tensors, layer: str, part: str, types: Collection[str] = FLOATS
) -> float:
    """A number of a layer, as a tensor of one element; raises as `require_grid`."""
    stored = tensors.get(f"{layer}.{part}")
    shape = stored.shape if stored is not None and set(stored.shape) <= {1} else (1,)
    return float(require_tensor(tensors, layer, part, shape, types).read().reshape(()))


def powers_of_two(exponents: np.ndarray) -> Float[np.ndarray, "*shape"]:
    """Scales of MX formats, which are exponents."""
    return np.ldexp(np.float32(1), exponents.view(np.uint8).astype(np.int32) - 127)


ReadCodes = Callable[[int, int, slice], UInt8[np.ndarray, "R places"]]
"""(start, stop, places) -> those of rows [start:stop], in the order that they are stored in."""


def bytes_of(tensor: Tensor, flip: int = 0) -> ReadCodes:
    """Codes that are stored one a byte; `flip` changes bits of them, the first of a signed integer
    say."""

    def read(start: int, stop: int, places: slice) -> np.ndarray:
        return tensor.part(start, stop, places).view(np.uint8) ^ np.uint8(flip)

    return read


def nibbles_of(tensor: Tensor) -> ReadCodes:
    """Codes that are stored two a byte, the first in the low half."""

    def read(start: int, stop: int, places: slice) -> np.ndarray:
        around, inner = widened(places, 2, tensor.shape[1] * 2)
        octets = tensor.part(start, stop, slice(around.start // 2, around.stop // 2))
        return nibbles(octets)[:, inner]

    return read


@dataclass(frozen=True)
class BlockMatrix(QuantisedMatrix):
    """A matrix of codes by rows, with scales of blocks, and zero points where there are some."""

    coding: Coding
    shape: tuple[int, int]
    stored: ReadCodes
    scales: Grid
    zeros: Grid | None = None
    order: Int[np.ndarray, " K"] | None = None
    inputs: Inputs | None = None
    tensors: tuple[str, ...] = ()

    def codes(self, start: int, stop: int, places: slice) -> UInt8[np.ndarray, "R places"]:
        if self.order is not None:
            return self.stored(start, stop, slice(0, self.shape[1]))[:, self.order[places]]
        return self.stored(start, stop, places)

    def scales_and_minima(
        self, start: int, stop: int
    ) -> tuple[Float[np.ndarray, "R groups"], Float[np.ndarray, "R groups"] | None]:
        scales = self.scales.rows(start, stop)
        return scales, None if self.zeros is None else -scales * self.zeros.rows(start, stop)
