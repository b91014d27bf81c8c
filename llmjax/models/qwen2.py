"""Qwen 2 and 2.5: Llama with biased queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig
from .gguf_config import read_gguf_decoder
from .gguf_names import gguf_table
from .hf_config import layer_types, read_decoder
from .hf_names import hf_table

ARCHITECTURES = ("Qwen2ForCausalLM",)
GGUF_ARCHITECTURES = ("qwen2",)
WEIGHTS, GGUF_WEIGHTS = hf_table(), gguf_table()


def read_config(c: Mapping[str, Any]) -> DecoderConfig:
    return read_windowed(c, qkv_bias=True)


def read_windowed(c: Mapping[str, Any], **settings: Any) -> DecoderConfig:
    """Layers from max_window_layers on have a window, where the config turns windows on."""
    window = c.get("sliding_window", 4096) if c.get("use_sliding_window") else None
    types = layer_types(c, lambda i: window is not None and i >= c.get("max_window_layers", 28))
    return read_decoder(c, types=types, window=window, **settings)


def read_gguf_config(m: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    return read_gguf_decoder(m, tensors)
