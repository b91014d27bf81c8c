"""Llama 1 to 3.x and what has its shape: SmolLM2, Mistral, Yi, TinyLlama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig
from .gguf_names import gguf_table
from .rope_config import gguf_rope, hf_rope
from .weights import Source, WeightTable, unpermute_k, unpermute_q

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
GGUF_ARCHITECTURES = ("llama",)


def read_config(c: Mapping[str, Any]) -> DecoderConfig:
    heads = c["num_attention_heads"]
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    layers = c["num_hidden_layers"]
    return DecoderConfig(
        architecture=c["architectures"][0],
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        mlp_size=c["intermediate_size"],
        max_position=c["max_position_embeddings"],
        norm_eps=c["rms_norm_eps"],
        windows=(c.get("sliding_window"),) * layers,
        ropes=(hf_rope(c, head_dim),) * layers,
        attention_scale=head_dim**-0.5,
        tie_embeddings=c.get("tie_word_embeddings", False),
        qkv_bias=c.get("attention_bias", False),
        o_bias=c.get("attention_bias", False),
        mlp_bias=c.get("mlp_bias", False),
    )


def read_gguf_config(m: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    arch = m["general.architecture"]
    heads, hidden = m[f"{arch}.attention.head_count"], m[f"{arch}.embedding_length"]
    head_dim = m.get(f"{arch}.attention.key_length") or hidden // heads
    layers = m[f"{arch}.block_count"]
    return DecoderConfig(
        architecture=arch,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=m.get(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_size=m[f"{arch}.feed_forward_length"],
        max_position=m[f"{arch}.context_length"],
        norm_eps=m[f"{arch}.attention.layer_norm_rms_epsilon"],
        windows=(None,) * layers,
        ropes=(gguf_rope(m, head_dim),) * layers,
        attention_scale=head_dim**-0.5,
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
    )


def weights(config: DecoderConfig) -> WeightTable:
    layer = {
        "attn_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
    }
    layer |= {f"mlp.{p}.weight": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    layer |= {f"attn.{p}.weight": f"self_attn.{p}_proj.weight" for p in "qkvo"}
    if config.qkv_bias:
        layer |= {f"attn.{p}.bias": f"self_attn.{p}_proj.bias" for p in "qkv"}
    if config.o_bias:
        layer["attn.o.bias"] = "self_attn.o_proj.bias"
    if config.mlp_bias:
        layer |= {f"mlp.{p}.bias": f"mlp.{p}_proj.bias" for p in ("gate", "up", "down")}
    table = {
        f"layers.{{i}}.{path}": Source(f"model.layers.{{i}}.{name}") for path, name in layer.items()
    }
    table["embed.weight"] = Source("model.embed_tokens.weight")
    table["norm.weight"] = Source("model.norm.weight")
    if not config.tie_embeddings:
        table["head.weight"] = Source("lm_head.weight")
    return table


def gguf_weights(config: DecoderConfig) -> WeightTable:
    return gguf_table(
        config,
        {
            "attn.q.weight": unpermute_q,
            "attn.k.weight": unpermute_k,
            "attn.q.bias": unpermute_q,
            "attn.k.bias": unpermute_k,
        },
    )
