"""compressed-tensors checkpoints, as llmcompressor writes them.

`config_groups` say for which layers a scheme is (`schemes.py`), and what a layer's tensors mean
follows from its scheme and format (`matrices.py`). Which layers are quantised is seen by their
tensors: one that a scheme is for and that has floats stays as it is.

Source: https://github.com/neuralmagic/compressed-tensors (src/compressed_tensors/quantization,
compressors).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointFormatError
from ..base import Matrices, Tensors
from ..layers import layers_of, require_setting
from .matrices import read_matrix
from .schemes import Scheme, read_schemes, scheme_of

_CODES = ("I8", "F8_E4M3", "F8_E5M2")


def read(settings: Mapping[str, Any], tensors: Tensors) -> Matrices:
    """The quantised matrices of a checkpoint; see `llmjax.quant.read_matrices`."""
    sparsity = settings.get("sparsity_config") or {}
    require_setting("sparsity_config.format", sparsity.get("format", "dense"), ("dense",))
    require_setting("transform_config", settings.get("transform_config") or None, (None,))
    schemes, ignore = read_schemes(settings), settings.get("ignore") or []
    layers = {*layers_of(tensors, "weight_packed"), *layers_of(tensors, "weight_scale")} | {
        layer for layer in layers_of(tensors, "weight") if _is_coded(tensors, layer)
    }
    return {
        f"{layer}.weight": read_matrix(tensors, layer, _scheme(schemes, ignore, layer))
        for layer in sorted(layers)
    }


def _is_coded(tensors: Tensors, layer: str) -> bool:
    return tensors[f"{layer}.weight"].type_name in _CODES


def _scheme(schemes: list[Scheme], ignore: list[str], layer: str) -> Scheme:
    scheme = scheme_of(schemes, ignore, layer)
    if scheme is None:
        raise CheckpointFormatError(
            f"layer {layer} has quantised tensors, but no group of quantization_config's "
            "config_groups is for it, or it is ignored"
        )
    return scheme
