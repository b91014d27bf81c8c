"""The tensor names of Hugging Face's Llama, which most families share."""

from __future__ import annotations

from .config import DecoderConfig
from .weights import Source, Transform, WeightTable

_POST_NORMS = {
    "attn_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
}
_NORMS = {
    "pre": {
        "attn_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
    },
    "post": _POST_NORMS,
    "sandwich": {
        "attn_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "pre_feedforward_layernorm.weight",
        **_POST_NORMS,
    },
}


def hf_table(config: DecoderConfig, norms: Transform | None = None) -> WeightTable:
    """The tensors of a family that names them as most do.

    Args:
        norms: what to do to every norm's weight.
    """
    layer = dict(_NORMS[config.norm_placement])
    layer |= {f"attn.{p}.weight": f"self_attn.{p}_proj.weight" for p in "qkvo"}
    layer |= {f"mlp.{p}.weight": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    if config.qk_norm:
        layer |= {f"attn.{p}_norm.weight": f"self_attn.{p}_norm.weight" for p in "qk"}
    if config.qkv_bias:
        layer |= {f"attn.{p}.bias": f"self_attn.{p}_proj.bias" for p in "qkv"}
    if config.o_bias:
        layer["attn.o.bias"] = "self_attn.o_proj.bias"
    if config.mlp_bias:
        layer |= {f"mlp.{p}.bias": f"mlp.{p}_proj.bias" for p in ("gate", "up", "down")}
    table = {
        f"layers.{{i}}.{path}": Source(
            f"model.layers.{{i}}.{name}", norms if path.endswith("norm.weight") else None
        )
        for path, name in layer.items()
    }
    table["embed.weight"] = Source("model.embed_tokens.weight")
    table["norm.weight"] = Source("model.norm.weight", norms)
    if not config.tie_embeddings:
        table["head.weight"] = Source("lm_head.weight")
    return table
