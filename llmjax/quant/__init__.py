"""Checkpoints whose matrices are quantised: one file a format.

A format's `read(settings, tensors)` gives its matrices; `settings` is what the folder says of it
(`quantization_config` of config.json, or quantize_config.json).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..checks import shown
from ..errors import CheckpointFormatError, LlmjaxError
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
    if not isinstance(settings, Mapping):
        raise CheckpointFormatError(f"quantization_config is {shown(settings)}, expected an object")
    method = settings.get("quant_method")
    require_setting("quant_method", method, tuple(FORMATS))
    try:
        return FORMATS[str(method)](settings, tensors)
    except LlmjaxError:
        raise
    except (ArithmeticError, AttributeError, LookupError, re.error, TypeError, ValueError) as error:
        raise CheckpointFormatError(
            f"quantization_config ({method}) has a value that means nothing: {error}"
        ) from error


def read_kv_code(settings: Mapping[str, Any]) -> str | None:
    """What a checkpoint asks keys and values to be kept as: "fp8_e4m3", "int8", or nothing.

    Scales that go with it are not read: pages in 8 bits have their own for each token and head
    (`llmjax_kernels.kv_format`), which are finer.

    Raises:
        UnsupportedModelError: it asks for something else.
    """
    scheme = settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo")
    if scheme is None:
        return None
    if isinstance(scheme, Mapping):
        scheme = f"{scheme.get('type')}{scheme.get('num_bits')}"
    require_setting("kv_cache_scheme", scheme, tuple(_KV_CODES))
    return _KV_CODES[str(scheme)]


_KV_CODES = {
    "float8": "fp8_e4m3",
    "int8": "int8",
    "static": "fp8_e4m3",  # AutoFP8's
    "FP8": "fp8_e4m3",  # ModelOpt's
    "INT8": "int8",
}


__all__ = [
    "CodedRows",
    "Coding",
    "Inputs",
    "Matrices",
    "QuantisedMatrix",
    "Tensor",
    "read_kv_code",
    "read_matrices",
]
