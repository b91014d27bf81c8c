"""Gemma 3, text: Gemma 2 with normed queries and keys, five windows to each full layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig, RopeConfig
from .gemma2 import GGUF_WEIGHTS, WEIGHTS, read_gemma, read_gguf_gemma
from .gguf_config import gguf_key, gguf_layer_types
from .hf_config import FULL, layer_types
from .rope_config import gguf_rope, hf_rope

ARCHITECTURES = ("Gemma3ForCausalLM",)
GGUF_ARCHITECTURES = ("gemma3",)
__all__ = ["GGUF_WEIGHTS", "WEIGHTS"]
_LAYERS_OF_27B = 62
_LOCAL_THETA = 10_000.0


def read_config(c: Mapping[str, Any]) -> DecoderConfig:
    pattern = c.get("sliding_window_pattern", 6)
    types = layer_types(c, lambda i: (i + 1) % pattern != 0)
    head_dim = c.get("head_dim", 256)
    return read_gemma(
        c,
        types=types,
        ropes=tuple(_rope(c, head_dim, kind) for kind in types),
        qk_norm="head",
        attention_softcap=c.get("attn_logit_softcapping"),
        logits_softcap=c.get("final_logit_softcapping"),
    )


def _rope(c: Mapping[str, Any], head_dim: int, layer_type: str) -> RopeConfig:
    if layer_type in (c.get("rope_parameters") or {}) or layer_type == FULL:
        theta = 1_000_000.0 if layer_type == FULL else _LOCAL_THETA
        return hf_rope(c, head_dim, layer_type, theta)
    # before transformers 5, rope_scaling was for the full layers alone
    return RopeConfig(theta=c.get("rope_local_base_freq", _LOCAL_THETA), dim=head_dim)


def read_gguf_config(m: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    types = gguf_layer_types(m, lambda i: (i + 1) % 6 != 0)
    head_dim = gguf_key(m, "attention.key_length")
    full = gguf_rope(m, tensors, head_dim)
    local = RopeConfig(theta=gguf_key(m, "rope.freq_base_swa", _LOCAL_THETA), dim=full.dim)
    return read_gguf_gemma(
        m,
        tensors,
        layers_of_27b=_LAYERS_OF_27B,
        types=types,
        window=gguf_key(m, "attention.sliding_window", None),
        ropes=tuple(full if kind == FULL else local for kind in types),
        qk_norm="head",
        logits_softcap=gguf_key(m, "final_logit_softcapping", None),
    )
