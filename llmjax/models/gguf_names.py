"""llama.cpp's tensor names, which all its architectures share."""

from __future__ import annotations

from .config import DecoderConfig
from .weights import Source, Transform, WeightTable, unpermute_k, unpermute_q

_LAYER = {
    "attn.q.weight": "attn_q.weight",
    "attn.k.weight": "attn_k.weight",
    "attn.v.weight": "attn_v.weight",
    "attn.o.weight": "attn_output.weight",
    "mlp.gate.weight": "ffn_gate.weight",
    "mlp.up.weight": "ffn_up.weight",
    "mlp.down.weight": "ffn_down.weight",
    "attn_norm.weight": "attn_norm.weight",
    "mlp_norm.weight": "ffn_norm.weight",
}
_POST_NORMS = {
    "attn_post_norm.weight": "post_attention_norm.weight",
    "mlp_post_norm.weight": "post_ffw_norm.weight",
}
_QK_NORMS = {"attn.q_norm.weight": "attn_q_norm.weight", "attn.k_norm.weight": "attn_k_norm.weight"}

INTERLEAVED_ROPE: dict[str, Transform] = {
    "attn.q.weight": unpermute_q,
    "attn.k.weight": unpermute_k,
    "attn.q.bias": unpermute_q,
    "attn.k.bias": unpermute_k,
}
"""The transforms of architectures whose rotary pairs llama.cpp keeps side by side."""


def gguf_table(
    config: DecoderConfig, transforms: dict[str, Transform] | None = None
) -> WeightTable:
    """The tensors of an architecture that names them as most do.

    Args:
        transforms: by a layer parameter's path after the layer number.
    """
    names = dict(_LAYER)
    if config.norm_placement == "post":
        del names["attn_norm.weight"], names["mlp_norm.weight"]
    if config.norm_placement in ("post", "sandwich"):
        names |= _POST_NORMS
    if config.qk_norm:
        names |= _QK_NORMS
    if config.qkv_bias:
        names |= {f"attn.{p}.bias": f"attn_{p}.bias" for p in "qkv"}
    if config.o_bias:
        names["attn.o.bias"] = "attn_output.bias"
    if config.mlp_bias:
        names |= {f"mlp.{p}.bias": f"ffn_{p}.bias" for p in ("gate", "up", "down")}
    table = {
        f"layers.{{i}}.{path}": Source(f"blk.{{i}}.{name}", (transforms or {}).get(path))
        for path, name in names.items()
    }
    table["embed.weight"] = Source("token_embd.weight")
    table["norm.weight"] = Source("output_norm.weight")
    if not config.tie_embeddings:
        table["head.weight"] = Source("output.weight")
    return table
