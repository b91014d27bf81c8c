"""OLMo 2: norms after the blocks, queries and keys normed over their whole width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModelError
from .config import DecoderConfig
from .gguf_config import gguf_key, read_gguf_decoder
from .gguf_names import gguf_table
from .hf_config import read_decoder
from .hf_names import POST_NORMS, hf_table

ARCHITECTURES = ("Olmo2ForCausalLM",)
GGUF_ARCHITECTURES = ("olmo2",)
WEIGHTS, GGUF_WEIGHTS = hf_table(POST_NORMS), gguf_table()


def read_config(c: Mapping[str, Any]) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    return read_decoder(c, qk_norm="full", norm_placement="post", qkv_bias=bias, o_bias=bias)


def read_gguf_config(m: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    if gguf_key(m, "attention.sliding_window", 0):
        raise UnsupportedModelError("OLMo 3 (olmo2 with a sliding window) is not implemented")
    return read_gguf_decoder(m, tensors, qk_norm="full", norm_placement="post")
