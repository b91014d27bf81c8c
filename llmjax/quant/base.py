"""Quantised matrices as checkpoints have them, whatever the format: codes, scales, minima.

A format reads its own tensors and says what their codes mean; those who load a model never ask
which format it was. Input k of a row has the value `number(code) * scale + minimum`, with the
scale and the minimum of its group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int, UInt8

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
# fmt: off
_NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)
# fmt: on

TABLES: dict[str, Float[np.ndarray, " codes"]] = {
    "e2m1": np.concatenate([_E2M1, -_E2M1]),
    "e4m3": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "nf4": _NF4,
    "fp4": np.concatenate([_FP4, -_FP4]),
}
"""The numbers that codes stand for where these are not integers. "nf4" and "fp4" are those of
bitsandbytes (csrc/kernels.cu); "e2m1" and "e4m3" of the OCP specifications."""

FP8_MOST = 448.0
"""The greatest number of E4M3."""


class Tensor(NamedTuple):
    """A tensor of a checkpoint, which is read by pieces.

    Attributes:
        type_name: as the file spells it ("I32", "F8_E4M3").
        rows: (start, stop) -> entries of the outermost axis, in the stored type.
        block: (start, stop, first, last) -> of a matrix, columns [first:last] of those.
    """

    shape: tuple[int, ...]
    type_name: str
    rows: Callable[[int, int], np.ndarray]
    block: Callable[[int, int, int, int], np.ndarray]

    def columns(self, first: int, last: int) -> np.ndarray:
        """Of a matrix, all of them."""
        return self.part(0, self.shape[0], slice(first, last))

    def part(self, start: int, stop: int, columns: slice) -> np.ndarray:
        """Of a matrix, some columns of rows [start:stop]; in one go where they are whole."""
        if (columns.start, columns.stop) == (0, self.shape[1]):
            return self.rows(start, stop)
        return self.block(start, stop, columns.start, columns.stop)

    def read(self) -> np.ndarray:
        """All of it."""
        return self.rows(0, self.shape[0] if self.shape else 1).reshape(self.shape)


Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Coding:
    """What the codes of a matrix mean.

    Attributes:
        name: of the format and its width, for people ("GPTQ 4 bits").
        bits: of a code.
        group: consecutive inputs that share a scale.
        zero: the code of 0, for integers without minima.
        minima: whether groups have minima. A zero point z is the minimum -z * scale.
        table: which of `TABLES` codes index; None are integers.
    """

    name: str
    bits: int
    group: int
    zero: int = 0
    minima: bool = False
    table: str | None = None

    def numbers(self, codes: UInt8[np.ndarray, "*S"]) -> Float[np.ndarray, "*S"]:
        """What codes stand for before they are scaled."""
        if self.table is not None:
            return TABLES[self.table][codes]
        return codes.astype(np.float32) - np.float32(0 if self.minima else self.zero)


@dataclass(frozen=True)
class Inputs:
    """How a scheme rounds the other factor before it multiplies (W8A8, W4A4).

    Attributes:
        code: "int8", "int4", "fp8_e4m3" or "e2m1".
        group: inputs that share a scale; 0 is all of a row.
        scale: that of all, where it is static; None has each row, or group of it, scaled by its
            greatest magnitude. Where `scales` is "e4m3", what they are multiplied by.
        zero: the zero point that goes with a static scale.
        symmetric: no zero points.
        reach: what the greatest magnitude becomes by a division; 0 is the greatest code, by a
            product with its inverse.
        scales: what scales are rounded to: "float32", "e4m3" (NVFP4) or "e8m0" (MX).
        threshold: values as great are left as they are; 0 rounds all.
    """

    code: str
    group: int = 0
    scale: float | None = None
    zero: float = 0.0
    symmetric: bool = True
    reach: float = 0.0
    scales: str = "float32"
    threshold: float = 0.0


class CodedRows(NamedTuple):
    """Some rows of a quantised matrix: codes of some or all of its places, and the numbers of all
    groups."""

    codes: UInt8[np.ndarray, "R places"]
    scales: Float[np.ndarray, "R groups"]
    minima: Float[np.ndarray, "R groups"] | None = None

    def to_bytes(self) -> UInt8[np.ndarray, "R bytes"]:
        """Row by row: codes, then scales, then minima, both in float32."""
        parts = [self.scales] if self.minima is None else [self.scales, self.minima]
        floats = [np.ascontiguousarray(p, np.float32).view(np.uint8) for p in parts]
        return np.concatenate([self.codes, *floats], axis=1)


class QuantisedMatrix(ABC):
    """A matrix [N, K] of a checkpoint that stays unread until rows are asked for.

    Attributes:
        shape: (N, K).
        coding: what its codes mean.
        tensors: the names of those that it consists of.
        order: input `order[j]` has its code at place j, where groups are not of neighbours
            (act-order); None has them as they are.
        inputs: how the other factor is to be rounded; None leaves it.
    """

    shape: tuple[int, int]
    coding: Coding
    tensors: tuple[str, ...]
    order: Int[np.ndarray, " K"] | None = None
    inputs: Inputs | None = None

    @abstractmethod
    def codes(self, start: int, stop: int, places: slice) -> UInt8[np.ndarray, "R places"]:
        """Of rows [start:stop], at some places; reads little more than these."""

    @abstractmethod
    def scales_and_minima(
        self, start: int, stop: int
    ) -> tuple[Float[np.ndarray, "R groups"], Float[np.ndarray, "R groups"] | None]:
        """Of rows [start:stop]."""

    def rows(self, start: int, stop: int, places: slice | None = None) -> CodedRows:
        """Rows [start:stop].

        Args:
            places: whose codes are wanted, from a start to a stop; None is all. Of none, nothing
                but scales and minima is read.
        """
        wanted = slice(0, self.shape[1]) if places is None else places
        codes = np.empty((stop - start, 0), np.uint8)
        if wanted.start < wanted.stop:
            codes = self.codes(start, stop, wanted)
        return CodedRows(codes, *self.scales_and_minima(start, stop))

    def dequantise(self, start: int, stop: int) -> Float[np.ndarray, "R K"]:
        """The float32 values of rows [start:stop], inputs in their own order."""
        codes, scales, minima = self.rows(start, stop)
        values = self.coding.numbers(codes)
        values *= np.repeat(scales.astype(np.float32), self.coding.group, axis=1)
        if minima is not None:
            values += np.repeat(minima.astype(np.float32), self.coding.group, axis=1)
        if self.order is None:
            return values
        placed = np.empty_like(values)
        placed[:, self.order] = values
        return placed


Matrices = dict[str, QuantisedMatrix]
"""By the name that the matrix would have were it not quantised."""
