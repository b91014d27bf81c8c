"""Gemma 2: scaled embeddings, norms on both sides of a block, soft caps, every other window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig
from .gguf_config import gguf_key, gguf_layer_types, read_gguf_decoder
from .gguf_names import gguf_table
from .hf_config import layer_types, read_decoder, refuse, required
from .hf_names import SANDWICH_NORMS, hf_table
from .weights import plus_one

ARCHITECTURES = ("Gemma2ForCausalLM",)
GGUF_ARCHITECTURES = ("gemma2",)
WEIGHTS, GGUF_WEIGHTS = hf_table(SANDWICH_NORMS, plus_one), gguf_table()
_LAYERS_OF_27B = 46


def read_config(c: Mapping[str, Any]) -> DecoderConfig:
    return read_gemma(
        c,
        types=layer_types(c, _slides),
        attention_softcap=c.get("attn_logit_softcapping", 50.0),
        logits_softcap=c.get("final_logit_softcapping", 30.0),
    )


def _slides(layer: int) -> bool:
    return layer % 2 == 0


def read_gemma(c: Mapping[str, Any], **settings: Any) -> DecoderConfig:
    """What Gemma 2 and 3 share; absent keys have the defaults of transformers' classes."""
    refuse(c, "use_bidirectional_attention")
    bias = c.get("attention_bias", False)
    return read_decoder(
        {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", **c},
        window=c.get("sliding_window", 4096),
        activation_key="hidden_activation",
        attention_scale=c.get("query_pre_attn_scalar", 256) ** -0.5,
        tie_embeddings=c.get("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        norm_placement="sandwich",
        embed_scale=required(c, "hidden_size") ** 0.5,
        **settings,
    )


def read_gguf_config(m: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    return read_gguf_gemma(
        m,
        tensors,
        layers_of_27b=_LAYERS_OF_27B,
        types=gguf_layer_types(m, _slides),
        window=gguf_key(m, "attention.sliding_window", 4096),
        attention_softcap=gguf_key(m, "attn_logit_softcapping", 50.0),
        logits_softcap=gguf_key(m, "final_logit_softcapping", 30.0),
    )


def read_gguf_gemma(
    m: Mapping[str, Any], tensors: Mapping[str, Any], *, layers_of_27b: int, **settings: Any
) -> DecoderConfig:
    """What Gemma 2 and 3 share.

    Args:
        layers_of_27b: tells the largest model, whose attention scale GGUF does not carry.
    """
    hidden, heads = gguf_key(m, "embedding_length"), gguf_key(m, "attention.head_count")
    largest = gguf_key(m, "block_count") == layers_of_27b
    scalar = hidden // heads if largest else gguf_key(m, "attention.key_length", hidden // heads)
    return read_gguf_decoder(
        m,
        tensors,
        attention_scale=scalar**-0.5,
        activation="gelu_tanh",
        norm_placement="sandwich",
        embed_scale=hidden**0.5,
        **settings,
    )
