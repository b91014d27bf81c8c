"""The one description of a decoder-only transformer that every family reads into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..nn.rope import RopeConfig

__all__ = ["DecoderConfig", "RopeConfig"]


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and arithmetic of a decoder-only transformer.

    Attributes:
        architecture: the checkpoint's own name, for messages ("LlamaForCausalLM", "llama").
        qk_norm: RMS norm of queries and keys over each head ("head": Qwen 3, Gemma 3) or
            over their whole width ("full": OLMo 2).
        norm_placement: norms before each block ("pre"), after it and before the residual
            add ("post": OLMo 2), or both ("sandwich": Gemma 2 and 3).
        windows: for each layer its sliding window in tokens, the current one counted, or
            None for full attention.
        ropes: for each layer its rotary embedding.
        attention_scale: multiplies q.k.
        attention_softcap, logits_softcap: c * tanh(x / c) where not None.
        embed_scale: multiplies embeddings (Gemma, Granite).
        residual_scale: multiplies each block's output before the residual add (Granite).
        logits_scale: multiplies the logits (Granite: 1 / logits_scaling).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_position: int
    norm_eps: float
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...]
    attention_scale: float
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0

    @property
    def head_in_layers(self) -> float:
        """Layers that have as many weights as the head."""
        attention = 2 * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.vocab_size / (attention + 3 * self.mlp_size)

    def regime(self, prompt_len: int) -> tuple[int, ...]:
        """What a token's keys and values depend on beside the tokens up to it."""
        return tuple(rope.regime(prompt_len) for rope in dict.fromkeys(self.ropes))
