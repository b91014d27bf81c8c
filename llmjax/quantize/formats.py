"""Integer codes as the folders of GPTQ, AWQ and compressed-tensors have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from ..errors import ConfigError
from ..quant.integers import pack
from .config import QuantizeConfig
from .grid import Grid, IntCodes
from .hub import Target
from .layer import Coded

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 neighbouring columns lies where in AWQ's words, from the lowest bits on."""
_WORD = 32

Tensors = dict[str, np.ndarray]


class IntFormat(NamedTuple):
    """How integer codes are written.

    Attributes:
        grid: which codes there are.
        group_size: inputs that share a scale; -1 is all of a row.
        tensors: what is written of a matrix, by the ends of their names.
        words_down, words_across: whether K, or N, must fill whole words of codes.
    """

    grid: Grid
    group_size: int
    tensors: Callable[[IntCodes], Tensors]
    words_down: bool = False
    words_across: bool = False

    def group_of(self, target: Target, shape: tuple[int, ...]) -> int:
        """Inputs of a group of a matrix [N, K].

        Raises:
            ConfigError: the format has no such matrices.
        """
        N, K = shape
        group = K if self.group_size == -1 else self.group_size
        if K % group:
            fits = [str(n) for n in (256, 128, 64, 32, 16, 8) if K % n == 0]
            raise ConfigError(
                f"group_size is {group}, and layer {target.module} has rows of {K} inputs, "
                f"allowed for it: {', '.join([*fits, '-1'])}"
            )
        for n, must in ((K, self.words_down), (N, self.words_across)):
            if must and n * self.grid.bits % _WORD:
                raise ConfigError(
                    f"layer {target.module} is {N} x {K}, of which {self.grid.bits}-bit codes "
                    "fill no whole words of 32 bits; allowed: to ignore it"
                )
        return group

    def coded(self, codes: IntCodes) -> Coded:
        """A matrix in these codes."""
        return Coded(codes.values, self.tensors(codes))


def int_format(config: QuantizeConfig, dtype: np.dtype) -> IntFormat:
    """The format of a method whose codes are integers.

    Args:
        dtype: of scales, where the format leaves that open.
    """
    bits = {"int4": 4, "int8": 8, "smoothquant": 8}.get(config.family) or config.bits
    group = -1 if config.group_size is None else config.group_size
    symmetric = config.symmetric is not False
    assert bits is not None
    if config.format == "gptq":
        grid = Grid(bits, symmetric, np.dtype(np.float16))
        return IntFormat(grid, group, _gptq, words_down=True, words_across=True)
    if config.format == "awq":
        half = np.dtype(np.float16) if dtype.itemsize > 2 else dtype
        return IntFormat(Grid(bits, symmetric, half), group, _awq, words_across=True)
    grid = Grid(bits, symmetric, dtype)
    if config.activations in ("dynamic", "static"):
        return IntFormat(grid, group, _bytes)
    return IntFormat(grid, group, _packed, words_across=not symmetric)


def _gptq(codes: IntCodes) -> Tensors:
    bits = codes.grid.bits
    # The first format stores them less one; asymmetric folders are in the second, as they are.
    zeros = codes.zeros - np.uint8(codes.grid.symmetric)
    return {
        "qweight": pack(codes.codes, bits).T,
        "qzeros": pack(np.ascontiguousarray(zeros.T), bits),
        "scales": codes.scales.T.astype(codes.grid.dtype),
        "g_idx": codes.groups,
    }


def _awq(codes: IntCodes) -> Tensors:
    return {
        "qweight": _awq_words(codes.codes.T),
        "qzeros": _awq_words(codes.zeros.T),
        "scales": codes.scales.T.astype(codes.grid.dtype),
    }


def _awq_words(columns: UInt8[np.ndarray, "R N"]) -> np.ndarray:
    eights = columns.reshape(len(columns), -1, len(_AWQ_ORDER))[:, :, _AWQ_ORDER]
    return pack(np.ascontiguousarray(eights.reshape(columns.shape)), 4)


def _packed(codes: IntCodes) -> Tensors:
    """compressed-tensors' pack-quantized: groups of neighbours, signed codes plus 2^(bits - 1)."""
    tensors = {
        "weight_packed": pack(codes.codes, codes.grid.bits),
        "weight_scale": codes.scales.astype(codes.grid.dtype),
        "weight_shape": np.array(codes.codes.shape, np.int64),
    }
    if not codes.grid.symmetric:
        zeros = np.ascontiguousarray(codes.zeros.T)
        tensors["weight_zero_point"] = pack(zeros, codes.grid.bits).T
    return tensors


def _bytes(codes: IntCodes) -> Tensors:
    """compressed-tensors' int-quantized."""
    return {
        "weight": (codes.codes.astype(np.int16) - codes.zeros[:, codes.groups]).astype(np.int8),
        "weight_scale": codes.scales.astype(codes.grid.dtype),
    }
