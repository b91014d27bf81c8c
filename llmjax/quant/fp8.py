"""FP8 checkpoints with `quant_method` "fp8": DeepSeek's and Qwen's blocks, AutoFP8's tensors.

A linear layer is `weight` F8_E4M3 [N, K] with `weight_scale_inv` (DeepSeek; it multiplies for
all its name) or `weight_scale`: [N / 128, K / 128] where `weight_block_size` says so, else one
number, or one a row. Inputs become FP8 too: by the greatest magnitude of 128 of them or of a
row, or by `input_scale` (AutoFP8) or `activation_scale` (transformers) where `activation_scheme`
is "static".

Sources: https://huggingface.co/deepseek-ai/DeepSeek-V3 (README_WEIGHTS.md, inference/kernel.py);
transformers, integrations/finegrained_fp8.py; https://github.com/neuralmagic/AutoFP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checks import shown
from ..errors import CheckpointFormatError
from .base import FP8_MOST, Coding, Inputs, Matrices, Tensors
from .blocks import (
    E8M0_TYPES,
    BlockMatrix,
    Grid,
    bytes_of,
    powers_of_two,
    require_grid,
    require_scalar,
)
from .layers import require_setting, require_tensor

_FP8 = "F8_E4M3"
_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALES = ("input_scale", "activation_scale")


def read(settings: Mapping[str, Any], tensors: Tensors) -> Matrices:
    """The quantised matrices of a checkpoint; see `llmjax.quant.read_matrices`."""
    scheme = settings.get("activation_scheme", "dynamic")
    require_setting("activation_scheme", scheme, ("dynamic", "static"))
    require_setting("fmt", settings.get("fmt", "e4m3"), ("e4m3",))
    require_setting("scale_fmt", settings.get("scale_fmt", "float"), ("float", "ue8m0"))
    block = _block(settings.get("weight_block_size"))
    return {
        f"{layer}.weight": _matrix(tensors, layer, block, scheme == "static")
        for layer in _layers(tensors)
    }


def _layers(tensors: Tensors) -> list[str]:
    """The layers whose weights are FP8, and those that only have a scale."""
    coded = {n.removesuffix(".weight") for n, t in tensors.items() if t.type_name == _FP8}
    scaled = {n.removesuffix(f".{part}") for n in tensors for part in _SCALES if _ends(n, part)}
    return sorted({layer for layer in coded if f"{layer}.weight" in tensors} | scaled)


def _ends(name: str, part: str) -> bool:
    return name.endswith(f".{part}")


def _block(stored: object) -> tuple[int, int] | None:
    if stored is None:
        return None
    if isinstance(stored, list) and len(stored) == 2:
        rows, inputs = stored
        if type(rows) is int and type(inputs) is int and min(rows, inputs) > 0:
            return rows, inputs
    raise CheckpointFormatError(
        f"quantization: weight_block_size is {shown(stored)}, expected rows and inputs"
    )


def _matrix(
    tensors: Tensors, layer: str, block: tuple[int, int] | None, static: bool
) -> BlockMatrix:
    weight = require_tensor(tensors, layer, "weight", (None, None), (_FP8,))
    shape = (weight.shape[0], weight.shape[1])
    part = next((p for p in _SCALES if f"{layer}.{p}" in tensors), _SCALES[bool(block is None)])
    scales = _scales(tensors, layer, part, shape, block)
    names = [f"{layer}.weight", f"{layer}.{part}"]
    inputs = Inputs("fp8_e4m3", group=block[1] if block else 0, reach=FP8_MOST)
    if static:
        scale = next((p for p in _INPUT_SCALES if f"{layer}.{p}" in tensors), _INPUT_SCALES[0])
        inputs = Inputs("fp8_e4m3", scale=require_scalar(tensors, layer, scale))
        names.append(f"{layer}.{scale}")
    return BlockMatrix(
        Coding("FP8", 8, scales.group, table="e4m3"),
        shape,
        bytes_of(weight),
        scales,
        inputs=inputs,
        tensors=tuple(names),
    )


def _scales(
    tensors: Tensors, layer: str, part: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> Grid:
    stored = tensors.get(f"{layer}.{part}")
    powers = stored is not None and stored.type_name in E8M0_TYPES
    if block is None:
        by_row = stored is not None and stored.shape in ((shape[0],), (shape[0], 1))
        block = (1 if by_row and shape[0] > 1 else shape[0], shape[1])
    if powers:
        return require_grid(tensors, layer, part, shape, block, E8M0_TYPES, powers_of_two)
    return require_grid(tensors, layer, part, shape, block)
