"""llama.cpp's tensor names, which all its architectures share."""

from __future__ import annotations

from collections.abc import Mapping

from .weights import Transform, WeightTable, unpermute_k, unpermute_q, weight_table

_NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "layers.{i}.attn.q": "blk.{i}.attn_q",
    "layers.{i}.attn.k": "blk.{i}.attn_k",
    "layers.{i}.attn.v": "blk.{i}.attn_v",
    "layers.{i}.attn.o": "blk.{i}.attn_output",
    "layers.{i}.attn.q_norm": "blk.{i}.attn_q_norm",
    "layers.{i}.attn.k_norm": "blk.{i}.attn_k_norm",
    "layers.{i}.mlp.gate": "blk.{i}.ffn_gate",
    "layers.{i}.mlp.up": "blk.{i}.ffn_up",
    "layers.{i}.mlp.down": "blk.{i}.ffn_down",
    "layers.{i}.attn_norm": "blk.{i}.attn_norm",
    "layers.{i}.mlp_norm": "blk.{i}.ffn_norm",
    "layers.{i}.attn_post_norm": "blk.{i}.post_attention_norm",
    "layers.{i}.mlp_post_norm": "blk.{i}.post_ffw_norm",
}

INTERLEAVED_ROPE: dict[str, Transform] = {
    "layers.{i}.attn.q": unpermute_q,
    "layers.{i}.attn.k": unpermute_k,
}
"""The transforms of architectures whose rotary pairs llama.cpp keeps side by side."""


def gguf_table(transforms: Mapping[str, Transform] | None = None) -> WeightTable:
    """The tensors of an architecture that names them as most do.

    Args:
        transforms: what to do to the weight and the bias of a module.
    """
    return weight_table(_NAMES, transforms or {})
