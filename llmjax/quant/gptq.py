"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

A linear layer [N, K] is `qweight` [K * bits / 32, N], codes packed along K; `qzeros`
[groups, N * bits / 32], zero points packed along N, less one in all but "gptq_v2"; `scales`
[groups, N]; and `g_idx` [K], the group of each input, which act-order scatters.

Source: https://github.com/ModelCloud/GPTQModel, gptqmodel/nn_modules/qlinear.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from ..errors import CheckpointFormatError
from .base import Matrices, Tensors
from .integers import unpack, widened
from .layers import (
    FLOATS,
    group_of,
    layers_of,
    order_of,
    require_setting,
    require_tensor,
    settings_of,
)
from .zero_points import ZeroPointMatrix

_CODES_OF_WORDS = 32
"""So many codes of any width fill whole words."""


def read(settings: Mapping[str, Any], tensors: Tensors) -> Matrices:
    """The quantised matrices of a checkpoint; see `llmjax.quant.read_matrices`."""
    stored = settings.get("checkpoint_format", settings.get("format", "gptq"))
    require_setting("checkpoint_format", stored, ("gptq", "gptq_v2"))
    return {
        f"{layer}.weight": _GPTQMatrix(
            layer, tensors, settings_of(layer, settings), less=int(stored == "gptq")
        )
        for layer in layers_of(tensors, "qweight")
    }


class _GPTQMatrix(ZeroPointMatrix):
    def __init__(self, layer: str, tensors: Tensors, settings: Mapping[str, Any], less: int):
        bits: Any = settings.get("bits")
        require_setting(f"bits of layer {layer}", bits, (2, 3, 4, 8))
        self._qweight = require_tensor(tensors, layer, "qweight", (None, None), ("I32",))
        words, N = self._qweight.shape
        if words * 32 % bits or N * bits % 32:
            raise CheckpointFormatError(
                f"layer {layer}: qweight {[words, N]} does not hold whole rows of {bits} bits"
            )
        K = words * 32 // bits
        group = group_of(layer, settings, K)
        super().__init__(f"GPTQ {bits} bits", (N, K), bits, group)
        self._layer, self._less = layer, less
        self._scales = require_tensor(tensors, layer, "scales", (K // group, N), FLOATS)
        width = N * bits // 32
        self._qzeros = require_tensor(tensors, layer, "qzeros", (K // group, width), ("I32",))
        parts = ["qweight", "qzeros", "scales"]
        self._g_idx = None
        if f"{layer}.g_idx" in tensors:
            self._g_idx = require_tensor(tensors, layer, "g_idx", (K,), ("I32", "I64"))
            parts.append("g_idx")
        self.tensors = tuple(f"{layer}.{part}" for part in parts)

    @functools.cached_property
    def order(self) -> Int[np.ndarray, " K"] | None:  # type: ignore[override]
        if self._g_idx is None:
            return None
        return order_of(self._layer, self._g_idx.read(), self._group)

    def codes(self, start: int, stop: int, places: slice) -> UInt8[np.ndarray, "R places"]:
        if self.order is not None:
            return unpack(self._qweight.columns(start, stop).T, self._bits)[:, self.order[places]]
        around, inner = widened(places, _CODES_OF_WORDS, self.shape[1])
        words = (around.start * self._bits // 32, around.stop * self._bits // 32)
        return unpack(self._qweight.part(*words, slice(start, stop)).T, self._bits)[:, inner]

    def scales(self, start: int, stop: int) -> Float[np.ndarray, "R groups"]:
        return self._scales.columns(start, stop).T

    def zeros(self, start: int, stop: int) -> UInt8[np.ndarray, "R groups"]:
        first = start // _CODES_OF_WORDS * _CODES_OF_WORDS
        last = min(-(-stop // _CODES_OF_WORDS) * _CODES_OF_WORDS, self.shape[0])
        words = self._qzeros.columns(first * self._bits // 32, last * self._bits // 32)
        zeros = unpack(words, self._bits)[:, start - first : stop - first].T
        return zeros + np.uint8(self._less) & np.uint8(2**self._bits - 1)
