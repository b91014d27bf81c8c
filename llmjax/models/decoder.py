"""The decoder-only transformer that every text family here is a configuration of."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from llmjax_kernels.native.blocks import Projection, linear
from llmjax_kernels.packed import PackedWeight
from llmjax_kernels.paged_attention import AttentionSpec
from llmjax_kernels.quant_matmul import QuantWeight, quant_matmul

from ..nn.attention import Attention, AttentionContext, DenseContext
from ..nn.linear import Embedding, Linear, project
from ..nn.mlp import GatedMLP
from ..nn.native import NativeContext
from ..nn.norm import RMSNorm
from ..nn.rope import RopeConfig, Rotation, rotation
from .config import DecoderConfig


class ForwardOutput(NamedTuple):
    """All that one sequence's forward pass computes.

    Attributes:
        logits: float32 [T, V].
        hidden_states: the embeddings, then each layer's output: L + 1 arrays [T, D]; the
            last one before the final norm.
        attentions: each layer's weights [N, T, T] if asked for, else empty.
    """

    logits: Float[Array, "T V"]
    hidden_states: tuple[Float[Array, "T D"], ...]
    attentions: tuple[Float[Array, "N T T"], ...]


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each with its norms and residual add."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: jnp.dtype):
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.norm_eps)

        spec = AttentionSpec(
            config.attention_scale, config.windows[layer], config.attention_softcap
        )
        self.attn = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            spec,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            dtype=dtype,
        )
        self.mlp = GatedMLP(
            config.hidden_size,
            config.mlp_size,
            config.activation,
            bias=config.mlp_bias,
            dtype=dtype,
        )
        before = config.norm_placement in ("pre", "sandwich")
        after = config.norm_placement in ("post", "sandwich")
        self.attn_norm = norm() if before else None
        self.mlp_norm = norm() if before else None
        self.attn_post_norm = norm() if after else None
        self.mlp_post_norm = norm() if after else None
        self.residual_scale = config.residual_scale
        self.norm_eps = config.norm_eps

    def __call__(
        self,
        x: Float[Array, "T D"],
        rope: Rotation,
        layer: int,
        context: AttentionContext | NativeContext,
    ) -> Float[Array, "T D"]:
        if isinstance(context, NativeContext):
            return context.layer(self, x, rope, layer)
        h = self.attn_norm(x) if self.attn_norm else x
        x = self._add(x, self.attn(h, rope, layer, context), self.attn_post_norm)
        h = self.mlp_norm(x) if self.mlp_norm else x
        return self._add(x, self.mlp(h), self.mlp_post_norm)

    def _add(self, x: Array, update: Array, post_norm: RMSNorm | None) -> Array:
        if post_norm:
            update = post_norm(update)
        return x + (update if self.residual_scale == 1 else update * self.residual_scale)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head; parameter paths are listed in weights.py."""

    first_layer = 0

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(config, i, dtype) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = (
            None
            if config.tie_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        )

    def __call__(
        self,
        tokens: Int[Array, " T"] | None = None,
        *,
        inputs_embeds: Float[Array, "T D"] | None = None,
        attentions: bool = False,
    ) -> ForwardOutput:
        """One whole sequence, differentiable in the weights and in `inputs_embeds`.

        Args:
            inputs_embeds: takes the place of `tokens`, as `embed_tokens` gives them.
            attentions: also return the attention weights.
        """
        if (tokens is None) == (inputs_embeds is None):
            raise ValueError("give either tokens or inputs_embeds")
        if inputs_embeds is None:
            assert tokens is not None
            inputs_embeds = self.embed_tokens(tokens)
        length = inputs_embeds.shape[0]
        context = DenseContext(keep_weights=attentions)
        positions = jnp.arange(length, dtype=jnp.int32)
        states = [inputs_embeds]
        ropes = self.rotations(positions, jnp.full(length, length, jnp.int32))
        for i, layer in enumerate(self.layers):
            states.append(layer(states[-1], ropes[self.config.ropes[i]], i, context))
        logits = self.logits(self.norm(states[-1]))
        return ForwardOutput(logits, tuple(states), tuple(context.weights))

    def hidden(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        context_lens: Int[Array, " T"],
        context: AttentionContext | NativeContext,
    ) -> Float[Array, "T D"]:
        """What the head reads: the last layer's output after the final norm."""
        return self.norm(self.run(self.embed_tokens(tokens), positions, context_lens, context))

    def run(
        self,
        x: Float[Array, "T D"],
        positions: Int[Array, " T"],
        context_lens: Int[Array, " T"],
        context: AttentionContext | NativeContext,
    ) -> Float[Array, "T D"]:
        """The output of the last layer that is here, of the input of the first."""
        ropes = self.rotations(positions, context_lens)
        for i, layer in enumerate(self.layers, self.first_layer):
            x = layer(x, ropes[self.config.ropes[i]], i, context)
        return x

    def embed_tokens(self, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        x = self.embed(tokens)
        # The scale is rounded to x's type first, as Gemma was trained.
        return (
            x if self.config.embed_scale == 1 else x * jnp.asarray(self.config.embed_scale, x.dtype)
        )

    def rotations(
        self, positions: Int[Array, " T"], context_lens: Int[Array, " T"]
    ) -> dict[RopeConfig, Rotation]:
        """The angles of each distinct rotary embedding among the layers."""
        return {c: rotation(c, positions, context_lens) for c in dict.fromkeys(self.config.ropes)}

    def logits(
        self, hidden: Float[Array, "*T D"], num_rows: Int[Array, " 1"] | None = None
    ) -> Float[Array, "*T V"]:
        """float32 logits of final hidden states.

        Args:
            num_rows: only so many rows of [T, D] are wanted; native kernels compute no more,
                and are not differentiable.
        """
        weight = self.embed.weight if self.head is None else self.head.weight
        packed = weight.get_value()
        if num_rows is not None and isinstance(packed, PackedWeight):
            logits = linear(hidden, Projection(packed), num_rows)
        elif isinstance(packed, QuantWeight):
            logits = quant_matmul(hidden, packed, jnp.dtype(jnp.float32))
        else:
            logits = project(hidden, weight[...])
        if self.config.logits_scale != 1:
            logits *= self.config.logits_scale
        if self.config.logits_softcap is not None:
            logits = self.config.logits_softcap * jnp.tanh(logits / self.config.logits_softcap)
        return logits


class Stage(Decoder):
    """A part of a decoder: some of its layers, the embedding before the first and the final norm
    and head behind the last. It has no more than these, and only methods that need no more work.

    Args:
        layers: of the decoder.
    """

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype, layers: range):
        self.config = config
        self.first_layer = layers.start
        is_last = layers.stop == config.num_layers
        if not layers.start or (is_last and config.tie_embeddings):
            self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(config, i, dtype) for i in layers])
        if is_last:
            self.norm = RMSNorm(config.hidden_size, config.norm_eps)
            tied = config.tie_embeddings
            size = config.hidden_size, config.vocab_size
            self.head = None if tied else Linear(*size, bias=False, dtype=dtype)
