"""The same model with its channels in another order, whose weights lie on no grid."""

from __future__ import annotations

import numpy as np

from ..models import DecoderConfig


def reordered(arrays: dict[str, np.ndarray], config: DecoderConfig) -> dict[str, np.ndarray]:
    """A Llama or Qwen 2 with its hidden, feed-forward and value channels shuffled.

    What a quantised file holds, read as floats, is on the grids of its groups: quantising it again
    would show nothing. Neighbours in the shuffled order are of many groups.

    Args:
        arrays: by decoder path.
    """
    rng = np.random.default_rng(0)
    hidden = rng.permutation(config.hidden_size)
    out = {n: v if n.endswith(".bias") else v[..., hidden] for n, v in arrays.items()}
    for i in range(config.num_layers):
        layer, mlp = f"layers.{i}", rng.permutation(config.mlp_size)
        channel = rng.permutation(config.head_dim)
        v_rows = channel + np.arange(config.num_kv_heads)[:, None] * config.head_dim
        o_columns = channel + np.arange(config.num_heads)[:, None] * config.head_dim
        o, down = arrays[f"{layer}.attn.o.weight"], arrays[f"{layer}.mlp.down.weight"]
        out[f"{layer}.attn.o.weight"] = o[hidden][:, o_columns.ravel()]
        out[f"{layer}.mlp.down.weight"] = down[hidden][:, mlp]
        for name, rows in [("attn.v", v_rows.ravel()), ("mlp.gate", mlp), ("mlp.up", mlp)]:
            out[f"{layer}.{name}.weight"] = out[f"{layer}.{name}.weight"][rows]
        if config.qkv_bias:
            out[f"{layer}.attn.v.bias"] = arrays[f"{layer}.attn.v.bias"][v_rows.ravel()]
    return out
