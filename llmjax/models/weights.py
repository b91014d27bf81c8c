"""How a checkpoint's tensors become a decoder's parameters, as data.

A family's table maps parameter paths to a `Source`; `{i}` stands for the layer in both. It
lists every parameter that there may be: the configuration says which a decoder has.
Parameters of a decoder (shapes in the house alphabet, weights are [out, in]):

    embed.weight [V D]                      head.weight [V D] (absent when tied)
    norm.weight [D]
    layers.{i}.attn.q.weight [N*H D]        .bias [N*H] where qkv_bias
    layers.{i}.attn.k.weight [K*H D]        .bias [K*H]
    layers.{i}.attn.v.weight [K*H D]        .bias [K*H]
    layers.{i}.attn.o.weight [D N*H]        .bias [D] where o_bias
    layers.{i}.attn.q_norm.weight [H] or [N*H]      k_norm likewise, where qk_norm
    layers.{i}.mlp.gate.weight [F D], mlp.up.weight [F D], mlp.down.weight [D F] (+ .bias)
    layers.{i}.attn_norm.weight, mlp_norm.weight [D]            (pre, sandwich)
    layers.{i}.attn_post_norm.weight, mlp_post_norm.weight [D]  (post, sandwich)

Norm weights are the effective multiplier, kept in float32: a family whose checkpoint
stores w for a multiplier of 1 + w adds one when it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import DecoderConfig

Transform = Callable[[np.ndarray, Any], np.ndarray]
"""(stored array, the model's configuration) -> parameter."""


@dataclass(frozen=True)
class Source:
    """One checkpoint tensor, and what to do to it.

    Attributes:
        name: the checkpoint's tensor name, `{i}` for the layer.
        transform: from the stored array to the parameter; None leaves it as it is.
    """

    name: str
    transform: Transform | None = None


WeightTable = Mapping[str, Source]


def weight_table(
    names: Mapping[str, str], transforms: Mapping[str, Transform | None]
) -> WeightTable:
    """The table of weights and biases, also of those that a configuration leaves out.

    Args:
        names: the checkpoint's name of each module.
        transforms: what to do to the weight and the bias of a module.
    """
    return {
        f"{module}.{kind}": Source(f"{name}.{kind}", transforms.get(module))
        for module, name in names.items()
        for kind in ("weight", "bias")
    }


def plus_one(w: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """A norm stored as w for a multiplier of 1 + w (Gemma)."""
    return w.astype(np.float32) + 1


def _interleaved_to_halves(w: np.ndarray, heads: int) -> np.ndarray:
    rest = w.shape[1:]
    pairs = w.reshape(heads, w.shape[0] // heads // 2, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(w.shape)


def unpermute_q(w: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """Query rows from GGUF llama's interleaved rotary pairs to two halves."""
    return _interleaved_to_halves(w, config.num_heads)


def unpermute_k(w: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """Key rows from GGUF llama's interleaved rotary pairs to two halves."""
    return _interleaved_to_halves(w, config.num_kv_heads)


def rows_of_qkv(part: str) -> Transform:
    """Rows of the fused [(N + 2K)*H D] projection that are "q", "k" or "v"."""

    def take(w: np.ndarray, config: DecoderConfig) -> np.ndarray:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        start, count = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[part]
        return w[start : start + count]

    return take


def rows_of_gate_up(part: str) -> Transform:
    """Rows of the fused [2F D] projection that are "gate" or "up"."""

    def take(w: np.ndarray, config: DecoderConfig) -> np.ndarray:
        half = config.mlp_size
        return w[:half] if part == "gate" else w[half:]

    return take
