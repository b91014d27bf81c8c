"""Random matrices of codes as checkpoints have them: integers and tables, groups, orders."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np

from llmjax.quant import CodedRows, Coding
from llmjax_kernels.code_tables import CODE_TABLES
from llmjax_kernels.packed import PackedWeight, pack_coded

CODED = {
    "2 bits": Coding("", 2, 32, zero=2),
    "3 bits with minima": Coding("", 3, 64, minima=True),
    "4 bits": Coding("", 4, 64, zero=8),
    "4 bits with minima": Coding("", 4, 96, minima=True),
    "4 bits by 16": Coding("", 4, 16, zero=7),
    "4 bits by 48 with minima": Coding("", 4, 48, minima=True),
    "4 bits in order": Coding("", 4, 32, zero=8),
    "4 bits with minima in order": Coding("", 4, 32, minima=True),
    "8 bits": Coding("", 8, 128, zero=128),
    "8 bits with minima": Coding("", 8, 32, minima=True),
    "8 bits of another zero": Coding("", 8, 64, zero=3),
    "8 bits in order": Coding("", 8, 32, zero=128),
    "e2m1": Coding("", 4, 32, table="e2m1"),
    "e2m1 by 16": Coding("", 4, 16, table="e2m1"),
    "nf4": Coding("", 4, 64, table="nf4"),
    "fp4": Coding("", 4, 64, table="fp4"),
}
"""By name; those "in order" have inputs in another."""


def group_size(name: str) -> int:
    """Inputs of which a row has a whole number."""
    return lcm(CODED[name].group, 32)


@dataclass(frozen=True)
class CodedWeight:
    """A matrix [N, K] of random codes.

    Attributes:
        order: the input whose code is at each place; None has them as they are.
    """

    coding: Coding
    rows: CodedRows
    order: np.ndarray | None

    def _spread(self, groups: np.ndarray) -> np.ndarray:
        return np.repeat(groups.astype(np.float64), self.coding.group, axis=1)

    def _placed(self, values: np.ndarray) -> np.ndarray:
        if self.order is None:
            return values
        placed = np.empty_like(values)
        placed[:, self.order] = values
        return placed

    @property
    def values(self) -> np.ndarray:
        """In float64; of tables by the integers that the kernels have."""
        codes, scales, minima = self.rows
        if self.coding.table is None:
            numbers = codes.astype(np.float64) - self.coding.zero
        else:
            table = CODE_TABLES[self.coding.table]
            numbers = np.array(table.integers)[codes] * table.unit
        values = numbers * self._spread(scales)
        return self._placed(values if minima is None else values + self._spread(minima))

    @property
    def magnitude(self) -> np.ndarray:
        """How large the numbers are that the kernels add up."""
        codes, scales, minima = self.rows
        most = {4: 15.0, 8: 255.0}[4 if self.coding.bits <= 4 else 8]
        if self.coding.table is not None:
            most = max(map(abs, CODE_TABLES[self.coding.table].integers))
            most *= CODE_TABLES[self.coding.table].unit
        size = most * self._spread(np.abs(scales)) + np.zeros(codes.shape)
        return self._placed(size if minima is None else size + self._spread(np.abs(minima)))

    def pack(self) -> PackedWeight:
        rows = self.rows.to_bytes()
        return pack_coded(rows, self.rows.codes.shape[1], self.coding, self.order)


def random_codes(
    name: str, N: int, K: int, rng: np.random.Generator, scale: float = 0.01
) -> CodedWeight:
    """Every code is as likely as any; scales are between a tenth of `scale` and it."""
    coding = CODED[name]
    codes = rng.integers(0, 2**coding.bits, (N, K), np.uint8)
    shape = (N, K // coding.group)

    def sizes() -> np.ndarray:
        found = rng.uniform(0.1, 1, shape) * rng.choice([-1, 1], shape) * scale
        return found.astype(np.float32)

    order = rng.permutation(K) if name.endswith("in order") else None
    minima = sizes() * 2 ** (coding.bits - 1) if coding.minima else None
    return CodedWeight(coding, CodedRows(codes, sizes(), minima), order)
