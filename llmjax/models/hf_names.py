"""The tensor names of Hugging Face's Llama, which most families share."""

from __future__ import annotations

from .weights import Transform, WeightTable, weight_table

_LAYER = {
    **{f"attn.{p}": f"self_attn.{p}_proj" for p in "qkvo"},
    **{f"attn.{p}_norm": f"self_attn.{p}_norm" for p in "qk"},
    **{f"mlp.{p}": f"mlp.{p}_proj" for p in ("gate", "up", "down")},
}
_NORMS = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
POST_NORMS = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
SANDWICH_NORMS = {**_NORMS, "mlp_norm": "pre_feedforward_layernorm", **POST_NORMS}


def hf_table(
    norms: dict[str, str] = _NORMS, norm_transform: Transform | None = None
) -> WeightTable:
    """The tensors of a family that names them as most do.

    Args:
        norms: names of a layer's norms.
        norm_transform: what to do to every norm's weight.
    """
    layer = {f"layers.{{i}}.{m}": f"model.layers.{{i}}.{n}" for m, n in (_LAYER | norms).items()}
    names = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", **layer}
    return weight_table(names, {m: norm_transform for m in names if m.endswith("norm")})
