"""Matrices of integers whose groups have zero points, as GPTQ and AWQ have them."""

from __future__ import annotations

import functools
from abc import abstractmethod

import numpy as np
from jaxtyping import Float, UInt8

from .base import Coding, QuantisedMatrix


class ZeroPointMatrix(QuantisedMatrix):
    """A matrix of the values (code - zero point) * scale.

    Zero points that are all alike, as symmetric schemes have them, are the coding's `zero`.

    Args:
        name: of the format and its width, for people.
        group: consecutive inputs that share a scale and a zero point.
    """

    def __init__(self, name: str, shape: tuple[int, int], bits: int, group: int):
        self.shape = shape
        self._name, self._bits, self._group = name, bits, group

    @abstractmethod
    def scales(self, start: int, stop: int) -> Float[np.ndarray, "R groups"]:
        """Of rows [start:stop]."""

    @abstractmethod
    def zeros(self, start: int, stop: int) -> UInt8[np.ndarray, "R groups"]:
        """The zero points of rows [start:stop]."""

    @functools.cached_property
    def coding(self) -> Coding:  # type: ignore[override]
        zeros = self.zeros(0, self.shape[0])
        zero = int(zeros.flat[0])
        same = bool((zeros == zero).all())
        return Coding(self._name, self._bits, self._group, zero if same else 0, minima=not same)

    def scales_and_minima(
        self, start: int, stop: int
    ) -> tuple[Float[np.ndarray, "R groups"], Float[np.ndarray, "R groups"] | None]:
        scales = self.scales(start, stop).astype(np.float32)
        if not self.coding.minima:
            return scales, None
        return scales, -scales * self.zeros(start, stop).astype(np.float32)
