"""What `quantization_config` says of a folder, as its readers take it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .config import QuantizeConfig
from .float_codes import FP8_BLOCK, MXFP4_BLOCK, NVFP4_BLOCK


def quantization_config(config: QuantizeConfig, ignored: Sequence[str]) -> dict[str, Any]:
    """The object in config.json.

    Args:
        ignored: linear layers that stay in floats, by their names in the folder.
    """
    if config.format == "gptq":
        return _gptq(config, ignored)
    if config.format == "awq":
        return _awq(config, ignored)
    return _compressed_tensors(config, ignored)


def _gptq(config: QuantizeConfig, ignored: Sequence[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": config.bits,
        "group_size": config.group_size,
        "desc_act": config.desc_act,
        "static_groups": config.static_groups,
        "act_group_aware": config.act_group_aware,
        "sym": config.symmetric,
        "damp_percent": config.damp,
        "true_sequential": True,
        "lm_head": False,
        "checkpoint_format": "gptq" if config.symmetric else "gptq_v2",
        "pack_dtype": "int32",
    }
    layers = [name for name in ignored if name != "lm_head"]
    if layers:
        settings["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in layers}
    return settings


def _awq(config: QuantizeConfig, ignored: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": config.bits,
        "group_size": config.group_size,
        "zero_point": not config.symmetric,
        "version": "gemm",
        "modules_to_not_convert": list(ignored),
    }


def _compressed_tensors(config: QuantizeConfig, ignored: Sequence[str]) -> dict[str, Any]:
    name, weights, inputs = _scheme(config)
    group = {
        "targets": ["Linear"],
        "format": name,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _scheme(config: QuantizeConfig) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """The format's name, and what it says of weights and of inputs."""
    if config.family == "fp8":
        return "float-quantized", _fp8_weights(config), _inputs(config, "float")
    if config.family == "nvfp4":
        weights = _numbers("float", 4, "tensor_group", NVFP4_BLOCK)
        return "nvfp4-pack-quantized", weights | {"scale_dtype": "torch.float8_e4m3fn"}, None
    if config.family == "mxfp4":
        weights = _numbers("float", 4, "group", MXFP4_BLOCK)
        return "mxfp4-pack-quantized", weights | {"scale_dtype": "torch.uint8"}, None
    bits = {"int4": 4, "int8": 8, "smoothquant": 8}.get(config.family) or config.bits
    in_groups = config.group_size not in (None, -1)
    strategy, size = ("group", config.group_size) if in_groups else ("channel", None)
    weights = _numbers("int", bits, strategy, size)
    if config.symmetric is False:
        weights |= {"symmetric": False, "zp_dtype": "torch.int8"}
    if config.desc_act:
        weights["actorder"] = "weight"
    inputs = _inputs(config, "int")
    return "pack-quantized" if inputs is None else "int-quantized", weights, inputs


def _fp8_weights(config: QuantizeConfig) -> dict[str, Any]:
    assert config.granularity is not None
    weights = _numbers("float", 8, config.granularity, None)
    if config.granularity == "block":
        weights["block_structure"] = [FP8_BLOCK, FP8_BLOCK]
    return weights


def _inputs(config: QuantizeConfig, kind: str) -> dict[str, Any] | None:
    if config.activations in (None, "none"):
        return None
    if config.activations == "static":
        return _numbers(kind, 8, "tensor", None)
    if config.granularity == "block":
        return _numbers(kind, 8, "group", FP8_BLOCK) | {"dynamic": True}
    return _numbers(kind, 8, "token", None) | {"dynamic": True}


def _numbers(kind: str, bits: int | None, strategy: str, group: int | None) -> dict[str, Any]:
    return {
        "type": kind,
        "num_bits": bits,
        "strategy": strategy,
        "group_size": group,
        "symmetric": True,
        "dynamic": False,
        "actorder": None,
    }
