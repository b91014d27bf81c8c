"""NVIDIA ModelOpt's FP8 and NVFP4 checkpoints (`hf_quant_config.json`, or config.json).

FP8: `weight` F8_E4M3 [N, K], `weight_scale` and `input_scale` one number each. NVFP4: `weight`
U8 [N, K / 2], the first input in the low half; `weight_scale` F8_E4M3 [N, K / 16], times
`weight_scale_2`; `input_scale`, by which the scales of the inputs' groups are divided before
they are rounded. Layers that stay as they are have floats.

Source: https://github.com/NVIDIA/TensorRT-Model-Optimizer (modelopt/torch/export).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .base import Coding, Inputs, Matrices, Tensors
from .blocks import BlockMatrix, bytes_of, nibbles_of, require_grid, require_scalar
from .layers import layers_of, require_groups, require_setting, require_tensor

NVFP4_GROUP = 16


def read(settings: Mapping[str, Any], tensors: Tensors) -> Matrices:
    """The quantised matrices of a checkpoint; see `llmjax.quant.read_matrices`."""
    algorithm = settings.get("quant_algo")
    require_setting("quant_algo", algorithm, tuple(_READERS))
    group = settings.get("group_size", NVFP4_GROUP)
    if algorithm == "NVFP4":
        require_setting("group_size", group, (NVFP4_GROUP, None))
    coded = ("F8_E4M3", "U8")
    layers = {*layers_of(tensors, "weight_scale")} | {
        layer for layer in layers_of(tensors, "weight") if _type(tensors, layer) in coded
    }
    reader = _READERS[str(algorithm)]
    return {f"{layer}.weight": reader(tensors, layer) for layer in sorted(layers)}


def _type(tensors: Tensors, layer: str) -> str:
    return tensors[f"{layer}.weight"].type_name


def _fp8(tensors: Tensors, layer: str) -> BlockMatrix:
    weight = require_tensor(tensors, layer, "weight", (None, None), ("F8_E4M3",))
    N, K = weight.shape
    scales = require_grid(tensors, layer, "weight_scale", (N, K), (N, K))
    return BlockMatrix(
        Coding("ModelOpt FP8", 8, K, table="e4m3"),
        (N, K),
        bytes_of(weight),
        scales,
        inputs=Inputs("fp8_e4m3", scale=require_scalar(tensors, layer, "input_scale")),
        tensors=_names(layer, "weight", "weight_scale", "input_scale"),
    )


def _nvfp4(tensors: Tensors, layer: str) -> BlockMatrix:
    packed = require_tensor(tensors, layer, "weight", (None, None), ("U8",))
    N, K = packed.shape[0], packed.shape[1] * 2
    require_groups(layer, K, NVFP4_GROUP)
    whole = np.float32(require_scalar(tensors, layer, "weight_scale_2"))

    def convert(scales: np.ndarray) -> np.ndarray:
        return scales.astype(np.float32) * whole

    scales = require_grid(
        tensors, layer, "weight_scale", (N, K), (1, NVFP4_GROUP), ("F8_E4M3",), convert
    )
    step = require_scalar(tensors, layer, "input_scale")
    return BlockMatrix(
        Coding("ModelOpt NVFP4", 4, NVFP4_GROUP, table="e2m1"),
        (N, K),
        nibbles_of(packed),
        scales,
        inputs=Inputs("e2m1", NVFP4_GROUP, scale=1 / step, scales="e4m3"),
        tensors=_names(layer, "weight", "weight_scale", "weight_scale_2", "input_scale"),
    )


_READERS = {"FP8": _fp8, "NVFP4": _nvfp4}


def _names(layer: str, *parts: str) -> tuple[str, ...]:
    return tuple(f"{layer}.{part}" for part in parts)
