"""Checkpoints whose matrices are quantised: one file a format.

A format's `read(settings, tensors)` gives its matrices; `settings` is what the folder says of it
(`quantization_config` of config.json, or quantize_config.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    mxfp4,
)
from .base import CodedRows, Coding, Inputs, Matrices, QuantisedMatrix, Tensor, Tensors
from .layers import require_setting

FORMATS = {
    "gptq": gptq.read,
    "awq": awq.read,
    "auto-round": auto_round.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "modelopt": modelopt.read,
    "bitsandbytes": bitsandbytes.read,
    "mxfp4": mxfp4.read,
}
"""By `quant_method`."""


def read_matrices(settings: Mapping[str, Any], tensors: Tensors) -> Matrices:
    """The quantised matrices of a checkpoint; reads nothing but what says how they are laid out.

    Args:
        settings: `quantization_config`, which names the method.
        tensors: all that the checkpoint has.

    Raises:
        UnsupportedModelError: the method, or something it asks for, is not implemented.
        CheckpointFormatError: a tensor of a layer is missing, or has a wrong shape or type.
    """
    method = settings.get("quant_method")
    require_setting("quant_method", method, tuple(FORMATS))
    return FORMATS[str(method)](settings, tensors)


__all__ = [
    "CodedRows",
    "Coding",
    "Inputs",
    "Matrices",
    "QuantisedMatrix",
    "Tensor",
    "read_matrices",
]
