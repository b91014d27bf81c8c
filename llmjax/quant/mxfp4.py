"""MXFP4 as gpt-oss has it: `X_blocks` U8 [N, K / 32, 16] and `X_scales` U8 [N, K / 32].

A byte is two inputs, the first in its low half; a scale is an exponent with a bias of 127.
Matrices of several experts, [E, N, ...], become one in which they lie one below another.

Source: https://github.com/openai/gpt-oss (gpt_oss/torch/weights.py); OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from ..errors import CheckpointFormatError
from .base import Coding, Matrices, Tensors
from .blocks import E8M0_TYPES, BlockMatrix, Grid, powers_of_two
from .integers import nibbles

GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"


def read(settings: Mapping[str, Any], tensors: Tensors) -> Matrices:
    """The quantised matrices of a checkpoint; see `llmjax.quant.read_matrices`.

    `modules_to_not_convert` says nothing that the tensors do not.
    """
    names = {n.removesuffix(s) for n in tensors for s in (_BLOCKS, _SCALES) if n.endswith(s)}
    return {name: _matrix(tensors, name) for name in sorted(names)}


def _matrix(tensors: Tensors, name: str) -> BlockMatrix:
    blocks, scales = tensors.get(name + _BLOCKS), tensors.get(name + _SCALES)
    if blocks is None or scales is None:
        lacking = _SCALES if scales is None else _BLOCKS
        raise CheckpointFormatError(f"layer {name} has no {name + lacking}, which MXFP4 needs")
    *outer, groups, octets = blocks.shape
    if blocks.type_name != "U8" or not outer or octets * 2 != GROUP:
        raise CheckpointFormatError(
            f"layer {name}: {_BLOCKS} is {blocks.type_name} {list(blocks.shape)}, expected U8 "
            f"[rows, groups, {GROUP // 2}]"
        )
    if scales.type_name not in E8M0_TYPES or scales.shape != (*outer, groups):
        raise CheckpointFormatError(
            f"layer {name}: {_SCALES} is {scales.type_name} {list(scales.shape)}, expected U8 "
            f"{[*outer, groups]}"
        )
    inner = prod(outer[1:])  # rows of an expert, where there are several

    def rows_of(read: Any, start: int, stop: int, width: int) -> np.ndarray:
        first = start // inner
        some = read(first, -(-stop // inner)).reshape(-1, width)
        return some[start - first * inner : stop - first * inner]

    def codes(start: int, stop: int, places: slice) -> np.ndarray:
        return nibbles(rows_of(blocks.rows, start, stop, groups * octets))[:, places]

    def exponents(start: int, stop: int) -> np.ndarray:
        return powers_of_two(rows_of(scales.rows, start, stop, groups))

    shape = (prod(outer), groups * GROUP)
    return BlockMatrix(
        Coding("MXFP4", 4, GROUP, table="e2m1"),
        shape,
        codes,
        Grid(exponents, (1, GROUP), shape[1]),
        tensors=(name + _BLOCKS, name + _SCALES),
    )
