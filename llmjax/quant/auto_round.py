"""AutoRound checkpoints, whose matrices lie as GPTQ or AWQ have them.

Source: https://github.com/intel/auto-round, auto_round/inference/backend.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import awq, gptq
from .base import Matrices, Tensors
from .layers import require_setting

_PACKINGS = {
    "auto_round:auto_gptq": {"checkpoint_format": "gptq"},
    "auto_round": {"checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"checkpoint_format": "gptq_v2"},
    "auto_round:auto_awq": {"version": "gemm"},
}


def read(settings: Mapping[str, Any], tensors: Tensors) -> Matrices:
    """The quantised matrices of a checkpoint; see `llmjax.quant.read_matrices`."""
    packing = settings.get("packing_format", "auto_round:auto_gptq")
    require_setting("packing_format", packing, tuple(_PACKINGS))
    require_setting("data_type", settings.get("data_type", "int"), ("int",))
    method = awq if packing == "auto_round:auto_awq" else gptq
    return method.read({**settings, **_PACKINGS[packing]}, tensors)
