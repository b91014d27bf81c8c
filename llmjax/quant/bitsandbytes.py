"""bitsandbytes checkpoints: NF4 and FP4, also with quantised scales, and LLM.int8.

4 bits: `weight` holds the codes of all of a matrix, two a byte, the first in the high half, in
whatever type it was stored as; blocks of them, which may pass from row to row, share a scale
`weight.absmax`. What is no tensor is JSON in `weight.quant_state.bitsandbytes__nf4`. With double
quantisation scales are bytes: numbers of `weight.nested_quant_map` times `weight.nested_absmax`
of their own blocks, plus an offset.

8 bits: `weight` I8 [N, K] and `SCB` [N], the greatest magnitude of a row. Inputs become int8 row
by row, but for those of `llm_int8_threshold` or more.

Source: https://github.com/bitsandbytes-foundation/bitsandbytes (bitsandbytes/functional.py,
QuantState; autograd/_functions.py, MatMul8bitLt).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from math import gcd
from typing import Any

import numpy as np
from jaxtyping import Float

from ..errors import CheckpointFormatError
from .base import TABLES, Coding, Inputs, Matrices, Tensors
from .blocks import BlockMatrix, Grid, bytes_of, require_grid
from .integers import nibbles
from .layers import layers_of, require_setting, require_tensor

_STATE = "weight.quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_STORED = ("U8", "I8", "F16", "BF16", "F32")
_INT8_MOST = 127


def read(settings: Mapping[str, Any], tensors: Tensors) -> Matrices:
    """The quantised matrices of a checkpoint; see `llmjax.quant.read_matrices`."""
    if not (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        require_setting("load_in_4bit and load_in_8bit", (False, False), ("one of them",))
    threshold = float(settings.get("llm_int8_threshold", 6.0))
    fours = {layer for kind in _KINDS for layer in layers_of(tensors, _STATE + kind)}
    fours |= {*layers_of(tensors, "weight.absmax")}
    eights = {*layers_of(tensors, "SCB")} | {
        layer
        for layer in layers_of(tensors, "weight")
        if tensors[f"{layer}.weight"].type_name == "I8" and layer not in fours
    }
    found: Matrices = {f"{layer}.weight": _four_bits(tensors, layer) for layer in sorted(fours)}
    for layer in sorted(eights):
        found[f"{layer}.weight"] = _eight_bits(tensors, layer, threshold)
    return found


def _eight_bits(tensors: Tensors, layer: str, threshold: float) -> BlockMatrix:
    weight = require_tensor(tensors, layer, "weight", (None, None), ("I8",))
    N, K = weight.shape
    parts = ["weight", "SCB"]
    if f"{layer}.weight_format" in tensors:
        stored = int(require_tensor(tensors, layer, "weight_format", (), ("U8",)).read())
        require_setting(f"weight_format of layer {layer}", stored, (0,))  # rows
        parts.append("weight_format")
    scales = require_grid(
        tensors, layer, "SCB", (N, K), (1, K), convert=lambda s: s.astype(np.float32) / _INT8_MOST
    )
    return BlockMatrix(
        Coding("bitsandbytes int8", 8, K, zero=128),
        (N, K),
        bytes_of(weight, flip=128),
        scales,
        inputs=Inputs("int8", threshold=threshold),
        tensors=tuple(f"{layer}.{part}" for part in parts),
    )


def _four_bits(tensors: Tensors, layer: str) -> BlockMatrix:
    kind, state = _state(tensors, layer)
    N, K = state["shape"]
    weight = require_tensor(tensors, layer, "weight", (None, 1), _STORED)
    octets = -(-N * K // 2)
    bytes_each = np.dtype(weight.rows(0, 1).dtype).itemsize
    if weight.shape[0] * bytes_each != octets:
        raise CheckpointFormatError(
            f"layer {layer}: weight has {weight.shape[0] * bytes_each} bytes, expected {octets} "
            f"for [{N}, {K}] of 4 bits"
        )
    parts = ["weight", "weight.absmax", "weight.quant_map", _STATE + kind]
    _check_map(tensors, layer, kind)
    nested = "nested_blocksize" in state
    if nested:
        parts += ["weight.nested_absmax", "weight.nested_quant_map"]
    scales = _scales(tensors, layer, state, nested)

    def codes(start: int, stop: int, places: slice) -> np.ndarray:
        first, last = start * K // 2, -(-stop * K // 2)
        stored = weight.rows(first // bytes_each, -(-last // bytes_each))
        some = nibbles(stored.reshape(-1).view(np.uint8), high_first=True)
        skipped = start * K - first // bytes_each * bytes_each * 2
        return some[skipped : skipped + (stop - start) * K].reshape(-1, K)[:, places]

    return BlockMatrix(
        Coding(f"bitsandbytes {kind}", 4, scales.group, table=kind),
        (N, K),
        codes,
        scales,
        tensors=tuple(f"{layer}.{part}" for part in parts),
    )


def _state(tensors: Tensors, layer: str) -> tuple[str, Mapping[str, Any]]:
    """Which of `_KINDS` a layer is, and what is known of it besides tensors."""
    kind = next((kind for kind in _KINDS if f"{layer}.{_STATE}{kind}" in tensors), None)
    if kind is None:
        raise CheckpointFormatError(
            f"layer {layer} has no {_STATE}{' or '.join(_KINDS)}, which its format needs"
        )
    stored = require_tensor(tensors, layer, _STATE + kind, (None,), ("U8",)).read()
    try:
        state = json.loads(stored.tobytes())
        shape, block = state["shape"], state["blocksize"]
        inner = state.get("nested_blocksize", 1)
        if "nested_blocksize" in state:
            float(state["nested_offset"])
        counts = [*shape, block, inner]
        if len(shape) != 2 or not all(type(n) is int and n > 0 for n in counts):
            raise ValueError(f"its shape is {shape}, its blocks have {block} and {inner}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointFormatError(f"layer {layer}: its quant_state is damaged: {error}") from None
    return kind, state


def _check_map(tensors: Tensors, layer: str, kind: str) -> None:
    numbers = require_tensor(tensors, layer, "weight.quant_map", (16,), ("F32",)).read()
    if not np.allclose(numbers, TABLES[kind], atol=1e-4):
        raise CheckpointFormatError(f"layer {layer}: its quant_map is not that of {kind}")


class _Blocks(Grid):
    """Scales of blocks that go on from row to row."""

    @property
    def group(self) -> int:
        return gcd(self.block[1], self.K)

    def rows(self, start: int, stop: int) -> Float[np.ndarray, "R groups"]:
        size = self.block[1]
        places = np.arange(start * self.K, stop * self.K, self.group) // size
        first = places[0]
        return self.read(first, places[-1] + 1)[places - first].reshape(stop - start, -1)


def _scales(tensors: Tensors, layer: str, state: Mapping[str, Any], nested: bool) -> Grid:
    N, K = state["shape"]
    size = state["blocksize"]
    count = -(-N * K // size)
    kinds = ("U8",) if nested else ("F32",)
    absmax = require_tensor(tensors, layer, "weight.absmax", (count,), kinds)
    if not nested:
        return _Blocks(absmax.rows, (1, size), K)
    inner = state["nested_blocksize"]
    numbers = require_tensor(tensors, layer, "weight.nested_quant_map", (256,), ("F32",))
    outer = require_tensor(tensors, layer, "weight.nested_absmax", (-(-count // inner),), ("F32",))
    offset = np.float32(state["nested_offset"])

    @functools.cache
    def whole() -> tuple[np.ndarray, np.ndarray]:
        return numbers.read(), outer.read()

    def read(start: int, stop: int) -> np.ndarray:
        table, factors = whole()
        places = np.arange(start, stop) // inner
        return table[absmax.rows(start, stop)] * factors[places] + offset

    return _Blocks(read, (1, size), K)
