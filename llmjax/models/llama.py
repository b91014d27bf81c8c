"""Llama 1 to 3.x and what has its shape: SmolLM2, Yi, TinyLlama. GGUF's llama is Mistral too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig
from .gguf_config import read_gguf_decoder
from .gguf_names import INTERLEAVED_ROPE, gguf_table
from .hf_config import read_decoder
from .hf_names import hf_table

ARCHITECTURES = ("LlamaForCausalLM",)
GGUF_ARCHITECTURES = ("llama",)
WEIGHTS, GGUF_WEIGHTS = hf_table(), gguf_table(INTERLEAVED_ROPE)


def read_config(c: Mapping[str, Any]) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    return read_decoder(c, qkv_bias=bias, o_bias=bias, mlp_bias=c.get("mlp_bias", False))


def read_gguf_config(m: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    return read_gguf_decoder(m, tensors)
