"""The bidirectional transformer with post-norms of BERT (Devlin et al., 2018) and RoBERTa."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from llmjax_kernels.paged_attention import AttentionSpec

from ..nn.linear import Embedding, Linear
from ..nn.mlp import ACTIVATIONS
from ..nn.norm import LayerNorm
from ..nn.segments import SegmentContext


@dataclass(frozen=True)
class EncoderConfig:
    """Shape and arithmetic of an encoder.

    Attributes:
        architecture: the checkpoint's own name, for messages ("BertModel").
        max_position: most tokens of a sequence.
        position_offset: rows of the position table before that of the first token (RoBERTa: 2).
        num_types: kinds of tokens: with 2, those of a pair's second text are of kind 1.
        scores: there is a head that gives one number for a text, or for a pair of them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    max_position: int
    position_offset: int
    num_types: int
    norm_eps: float
    activation: Literal["silu", "gelu", "gelu_tanh"]
    scores: bool


class EncoderLayer(nnx.Module):
    """Attention and feed-forward, each normed after its residual add."""

    def __init__(self, config: EncoderConfig, dtype: jnp.dtype):
        D, F = config.hidden_size, config.mlp_size
        self.attn = EncoderAttention(config, dtype)
        self.attn_norm = LayerNorm(D, config.norm_eps)
        self.up = Linear(D, F, bias=True, dtype=dtype)
        self.down = Linear(F, D, bias=True, dtype=dtype)
        self.mlp_norm = LayerNorm(D, config.norm_eps)
        self.activation = config.activation

    def __call__(
        self, x: Float[Array, "T D"], layer: int, context: SegmentContext
    ) -> Float[Array, "T D"]:
        x = self.attn_norm(x + self.attn(x, layer, context))
        return self.mlp_norm(x + self.down(ACTIVATIONS[self.activation](self.up(x))))


class EncoderAttention(nnx.Module):
    """Multi-head attention; positions are in the embeddings."""

    def __init__(self, config: EncoderConfig, dtype: jnp.dtype):
        D = config.hidden_size
        self.heads, self.head_dim = config.num_heads, D // config.num_heads
        self.spec = AttentionSpec(self.head_dim**-0.5, None, None)
        self.q = Linear(D, D, bias=True, dtype=dtype)
        self.k = Linear(D, D, bias=True, dtype=dtype)
        self.v = Linear(D, D, bias=True, dtype=dtype)
        self.o = Linear(D, D, bias=True, dtype=dtype)

    def __call__(
        self, x: Float[Array, "T D"], layer: int, context: SegmentContext
    ) -> Float[Array, "T D"]:
        q, k, v = (p(x).reshape(-1, self.heads, self.head_dim) for p in (self.q, self.k, self.v))
        return self.o(context.attend(layer, q, k, v, self.spec).reshape(x.shape))


class ScoreHead(nnx.Module):
    """One number of the first token's state: out(tanh(dense x))."""

    def __init__(self, hidden_size: int, dtype: jnp.dtype):
        self.dense = Linear(hidden_size, hidden_size, bias=True, dtype=dtype)
        self.out = Linear(hidden_size, 1, bias=True, dtype=dtype)

    def __call__(self, x: Float[Array, "S D"]) -> Float[Array, "S 1"]:
        return self.out(jnp.tanh(self.dense(x))).astype(jnp.float32)


class Encoder(nnx.Module):
    """Embeddings and layers; with a head where the configuration says so.

    Parameter paths, with {i} for the layer, under which `WEIGHTS` of a family gives the tensors:

        embed.weight [V D], position.weight [P D], type.weight [types D]
        norm, layers.{i}.attn_norm, layers.{i}.mlp_norm: weight, bias [D]
        layers.{i}.attn.q, k, v, o: weight [D D], bias [D]
        layers.{i}.up, down: weight [F D] and [D F], bias
        score.dense: weight [D D], bias; score.out: weight [1 D], bias      (scores)
    """

    def __init__(self, config: EncoderConfig, dtype: jnp.dtype):
        D, rows = config.hidden_size, config.max_position + config.position_offset
        self.config = config
        self.embed = Embedding(config.vocab_size, D, dtype=dtype)
        self.position = Embedding(rows, D, dtype=dtype)
        self.type = Embedding(config.num_types, D, dtype=dtype)
        self.norm = LayerNorm(D, config.norm_eps)
        self.layers = nnx.List([EncoderLayer(config, dtype) for _ in range(config.num_layers)])
        self.score = ScoreHead(D, dtype) if config.scores else None

    def hidden(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        types: Int[Array, " T"],
        context: SegmentContext,
    ) -> Float[Array, "T D"]:
        """The last layer's output.

        Args:
            types: kind of each token, see `EncoderConfig.num_types`.
        """
        x = self.embed(tokens) + self.position(positions + self.config.position_offset)
        x = self.norm(x + self.type(types))
        for i, layer in enumerate(self.layers):
            x = layer(x, i, context)
        return x
