"""Qwen 3 (dense): normed queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig
from .gguf_config import read_gguf_decoder
from .qwen2 import GGUF_WEIGHTS, WEIGHTS, read_windowed

ARCHITECTURES = ("Qwen3ForCausalLM",)
GGUF_ARCHITECTURES = ("qwen3",)
__all__ = ["GGUF_WEIGHTS", "WEIGHTS"]


def read_config(c: Mapping[str, Any]) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    return read_windowed({"head_dim": 128, **c}, qk_norm="head", qkv_bias=bias, o_bias=bias)


def read_gguf_config(m: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    return read_gguf_decoder(m, tensors, qk_norm="head")
