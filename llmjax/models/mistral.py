"""Mistral 7B, Nemo and others of MistralForCausalLM: Llama with a window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig
from .hf_config import SLIDING, read_decoder, required
from .llama import WEIGHTS

ARCHITECTURES = ("MistralForCausalLM",)
GGUF_ARCHITECTURES = ()  # converters write "llama"
__all__ = ["WEIGHTS"]


def read_config(c: Mapping[str, Any]) -> DecoderConfig:
    types = (SLIDING,) * required(c, "num_hidden_layers")
    return read_decoder(c, types=types, window=c.get("sliding_window", 4096))
