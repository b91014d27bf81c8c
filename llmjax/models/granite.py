"""Granite 3.x (dense): Llama with multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModelError
from .config import DecoderConfig
from .gguf_config import gguf_key, read_gguf_decoder
from .hf_config import read_decoder
from .llama import GGUF_WEIGHTS, WEIGHTS

ARCHITECTURES = ("GraniteForCausalLM",)
GGUF_ARCHITECTURES = ("granite",)
__all__ = ["GGUF_WEIGHTS", "WEIGHTS"]


def read_config(c: Mapping[str, Any]) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    return read_decoder(
        c,
        attention_scale=c.get("attention_multiplier", 1.0),
        embed_scale=c.get("embedding_multiplier", 1.0),
        residual_scale=c.get("residual_multiplier", 1.0),
        logits_scale=1 / c.get("logits_scaling", 1.0),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=c.get("mlp_bias", False),
    )


def read_gguf_config(m: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    if not gguf_key(m, "rope.scaling.finetuned", True):
        raise UnsupportedModelError("granite without rotary positions is not implemented")
    scale = gguf_key(m, "attention.scale", None)
    settings = {} if scale is None else {"attention_scale": scale}
    return read_gguf_decoder(
        m,
        tensors,
        embed_scale=gguf_key(m, "embedding_scale", 1.0),
        residual_scale=gguf_key(m, "residual_scale", 1.0),
        logits_scale=1 / gguf_key(m, "logit_scale", 1.0),
        **settings,
    )
