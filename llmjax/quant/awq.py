"""AWQ checkpoints, as AutoAWQ and GPTQModel write them: 4 bits, (code - zero point) * scale.

A linear layer [N, K] of version "gemm" is `qweight` [K, N / 8], `qzeros` [groups, N / 8] and
`scales` [groups, N]; the eight codes of a word are outputs in another order. Of version "gemv" it
is `qweight` [N, K / 8], `qzeros` [N, words] and `scales` [N, 8 words], in their order, where the
last two have room for more groups than there are.

Source: https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py and gemv.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from ..errors import CheckpointFormatError
from .base import Matrices, Tensor, Tensors
from .integers import unpack, widened
from .layers import FLOATS, group_of, layers_of, require_setting, require_tensor, settings_of
from .zero_points import ZeroPointMatrix

_BITS, _CODES = 4, 8
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word of "gemm" eight outputs have their codes."""
_OLD_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}


def read(settings: Mapping[str, Any], tensors: Tensors) -> Matrices:
    """The quantised matrices of a checkpoint; see `llmjax.quant.read_matrices`."""
    settings = {_OLD_NAMES.get(name, name): value for name, value in settings.items()}
    version = str(settings.get("version", settings.get("checkpoint_format", "gemm"))).lower()
    require_setting("version", version, tuple(_VERSIONS))
    return {
        f"{layer}.weight": _VERSIONS[version](layer, tensors, settings_of(layer, settings))
        for layer in layers_of(tensors, "qweight")
    }


class _AWQMatrix(ZeroPointMatrix):
    """What both versions share."""

    def __init__(self, layer: str, N: int, K: int, settings: Mapping[str, Any]):
        require_setting(f"bits of layer {layer}", settings.get("bits"), (_BITS,))
        group = group_of(layer, settings, K)
        super().__init__("AWQ 4 bits", (N, K), _BITS, group)
        self.tensors = tuple(f"{layer}.{part}" for part in ("qweight", "qzeros", "scales"))


class _GemmMatrix(_AWQMatrix):
    def __init__(self, layer: str, tensors: Tensors, settings: Mapping[str, Any]):
        self._qweight = require_tensor(tensors, layer, "qweight", (None, None), ("I32",))
        K, words = self._qweight.shape
        super().__init__(layer, words * _CODES, K, settings)
        groups = K // self._group
        self._qzeros = require_tensor(tensors, layer, "qzeros", (groups, words), ("I32",))
        shape = (groups, words * _CODES)
        self._scales = require_tensor(tensors, layer, "scales", shape, FLOATS)

    def codes(self, start: int, stop: int, places: slice) -> UInt8[np.ndarray, "R places"]:
        return _outputs(self._qweight, start, stop, places)

    def scales(self, start: int, stop: int) -> Float[np.ndarray, "R groups"]:
        return self._scales.columns(start, stop).T

    def zeros(self, start: int, stop: int) -> UInt8[np.ndarray, "R groups"]:
        return _outputs(self._qzeros, start, stop, slice(0, self._qzeros.shape[0]))


class _GemvMatrix(_AWQMatrix):
    def __init__(self, layer: str, tensors: Tensors, settings: Mapping[str, Any]):
        self._qweight = require_tensor(tensors, layer, "qweight", (None, None), ("I32",))
        N, words = self._qweight.shape
        super().__init__(layer, N, words * _CODES, settings)
        self._groups = self.shape[1] // self._group
        self._qzeros = require_tensor(tensors, layer, "qzeros", (N, None), ("I32",))
        room = self._qzeros.shape[1] * _CODES
        self._scales = require_tensor(tensors, layer, "scales", (N, room), FLOATS)
        if room < self._groups:
            raise CheckpointFormatError(
                f"layer {layer}: qzeros and scales have room for {room} groups, of which its rows "
                f"have {self._groups}"
            )

    def codes(self, start: int, stop: int, places: slice) -> UInt8[np.ndarray, "R places"]:
        around, inner = widened(places, _CODES, self.shape[1])
        words = slice(around.start // _CODES, around.stop // _CODES)
        return unpack(self._qweight.part(start, stop, words), _BITS)[:, inner]

    def scales(self, start: int, stop: int) -> Float[np.ndarray, "R groups"]:
        return self._scales.rows(start, stop)[:, : self._groups]

    def zeros(self, start: int, stop: int) -> UInt8[np.ndarray, "R groups"]:
        return unpack(self._qzeros.rows(start, stop), _BITS)[:, : self._groups]


_VERSIONS = {"gemm": _GemmMatrix, "gemv": _GemvMatrix}


def _outputs(
    tensor: Tensor, start: int, stop: int, entries: slice
) -> UInt8[np.ndarray, "R entries"]:
    """Some codes of outputs [start:stop] where words have those of eight outputs."""
    first, last = start // _CODES, -(-stop // _CODES)
    words: Int[np.ndarray, "entries words"]
    words = tensor.part(entries.start, entries.stop, slice(first, last))
    codes = unpack(words, _BITS).reshape(len(words), -1, _CODES)[:, :, _PLACES]
    codes = codes.reshape(len(words), -1)[:, start - first * _CODES : stop - first * _CODES]
    return np.ascontiguousarray(codes.T)
