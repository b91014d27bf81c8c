"""How values lie in the tiles that the native kernels stream: format.h by Python names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .code_tables import CODE_TABLES

TILE = 16
"""Rows of a tile."""


@dataclass(frozen=True)
class WeightFormat:
    """How a value is stored: (code - zero) * scale, plus a minimum where there is one.

    Attributes:
        bits: of a code; 16 and 32 are bfloat16 and float32 values as they are.
        group: consecutive inputs that share a scale (and a minimum).
        zero: the code of 0, or of the minimum; 128 of 8 bits and of tables, 0 of fewer bits with
            minima.
        minima: whether groups have minima.
        table: which of `CODE_TABLES` has the integers that codes stand for.
    """

    bits: int
    group: int = 32
    zero: int = 0
    minima: bool = False
    table: str | None = None

    @property
    def code(self) -> int:
        """As the kernels take it."""
        flags = self.minima | (CODE_TABLES[self.table].number << 1 if self.table else 0)
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
    "IQ4_NL": (20, WeightFormat(4, zero=128, table="iq4")),
    "IQ4_XS": (23, WeightFormat(4, zero=128, table="iq4")),
}
"""The number and the packed format of each GGUF type that stays quantised."""

QUANTISATIONS = {"int8": WeightFormat(8, zero=128), "int4": WeightFormat(4, minima=True)}
"""What float weights can be quantised to."""


class Coding(Protocol):
    """What the codes of a checkpoint's matrix mean: number(code) * scale + minimum.

    Attributes:
        bits: of a code.
        group: consecutive inputs that share a scale.
        zero: the code of 0, for integers without minima.
        minima: whether groups have minima.
        table: what codes index; None are integers, of which `zero` is taken off.
    """

    @property
    def bits(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def zero(self) -> int: ...
    @property
    def minima(self) -> bool: ...
    @property
    def table(self) -> str | None: ...


def coded_format(coding: Coding, K: int) -> WeightFormat | None:
    """How codes stay as they are; None where no kernel reads them so.

    Groups of any multiple of 32 become some of 32. Integers of 8 bits are counted from 128, as
    bytes are multiplied as signed ones too: another zero makes minima.
    """
    if K % 32 or coding.group % 16:
        return None
    group = 16 if coding.group % 32 else 32
    if coding.table is not None:
        table = coding.table if coding.table in CODE_TABLES and not coding.minima else None
        return WeightFormat(4, group, 128, table=table) if table else None
    if coding.bits <= 4:
        return WeightFormat(4, group, 0 if coding.minima else coding.zero, coding.minima)
    minima = coding.minima or coding.zero != 128
    return WeightFormat(8, 32, 128, minima) if coding.bits <= 8 and group == 32 else None


def gguf_format(type_name: str, K: int) -> WeightFormat | None:
    """How a GGUF tensor of this type stays quantised; None where it cannot."""
    return GGUF_FORMATS[type_name][1] if type_name in GGUF_FORMATS and K % 32 == 0 else None


def float_format(dtype: np.dtype) -> WeightFormat:
    """Tiles of float32 or bfloat16 values."""
    return FLOAT32 if np.dtype(dtype).itemsize == 4 else BFLOAT16
