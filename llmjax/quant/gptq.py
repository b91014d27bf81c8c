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
from jaxtyping import Int, UInt8

from .base import CodedRows, Coding, Matrices, QuantisedMatrix, Tensors
from .integers import unpack
from .layers import layers_of, order_of, require_groups, require_setting, require_tensor

_FLOATS = ("F16", "BF16", "F32")


def read(settings: Mapping[str, Any], tensors: Tensors) -> Matrices:
    """The quantised matrices of a checkpoint; see `llmjax.quant.read_matrices`."""
    bits, group = settings.get("bits"), int(settings.get("group_size", -1))
    stored = settings.get("checkpoint_format", "gptq")
    require_setting("bits", bits, (2, 3, 4, 8))
    require_setting("checkpoint_format", stored, ("gptq", "gptq_v2"))
    return {
        f"{layer}.weight": _GPTQMatrix(layer, tensors, bits, group, less=int(stored == "gptq"))
        for layer in layers_of(tensors, "qweight")
    }


class _GPTQMatrix(QuantisedMatrix):
    def __init__(self, layer: str, tensors: Tensors, bits: int, group: int, less: int):
        self._layer, self._bits, self._less = layer, bits, less
        self._qweight = require_tensor(tensors, layer, "qweight", (None, None), ("I32",))
        words, N = self._qweight.shape
        K = words * 32 // bits
        self.shape, self._group = (N, K), group if group > 0 else K
        require_groups(layer, K, self._group)
        groups = K // self._group
        self._scales = require_tensor(tensors, layer, "scales", (groups, N), _FLOATS)
        words = N * bits // 32
        self._qzeros = require_tensor(tensors, layer, "qzeros", (groups, words), ("I32",))
        parts = ["qweight", "qzeros", "scales"]
        self._g_idx = None
        if f"{layer}.g_idx" in tensors:
            self._g_idx = require_tensor(tensors, layer, "g_idx", (K,), ("I32", "I64"))
            parts.append("g_idx")
        self.tensors = tuple(f"{layer}.{part}" for part in parts)

    @functools.cached_property
    def _zeros(self) -> UInt8[np.ndarray, "groups N"]:
        zeros = unpack(self._qzeros.read(), self._bits)
        return (zeros + np.uint8(self._less)) & np.uint8(2**self._bits - 1)

    @functools.cached_property
    def coding(self) -> Coding:  # type: ignore[override]
        zero = int(self._zeros.flat[0])
        same = bool((self._zeros == zero).all())
        name = f"GPTQ {self._bits} bits"
        return Coding(name, self._bits, self._group, zero if same else 0, minima=not same)

    @functools.cached_property
    def order(self) -> Int[np.ndarray, " K"] | None:  # type: ignore[override]
        if self._g_idx is None:
            return None
        return order_of(self._layer, self._g_idx.read(), self._group)

    def rows(self, start: int, stop: int) -> CodedRows:
        codes = unpack(self._qweight.columns(start, stop).T, self._bits)
        if self.order is not None:
            codes = codes[:, self.order]
        scales = self._scales.columns(start, stop).T.astype(np.float32)
        if not self.coding.minima:
            return CodedRows(codes, scales)
        return CodedRows(codes, scales, -scales * self._zeros[:, start:stop].T)
