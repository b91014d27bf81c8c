"""A step's sequences for the native CPU kernels: a decoder layer as two calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from llmjax_kernels.layout import PagedKV, RaggedBatch
from llmjax_kernels.native import blocks
from llmjax_kernels.native.blocks import Projection, QKNorm, Residual

from .linear import Linear
from .norm import RMSNorm
from .rope import Rotation


class NativeContext:
    """The sequences of a ragged step; `pages` holds the updated pages afterwards.

    There is one pool for all layers of a group: fewer arrays to hand to each step.

    Takes the place of `PagedContext` where weights are packed: it computes whole layers.
    """

    def __init__(
        self,
        pages: list[PagedKV],
        batches: Sequence[RaggedBatch],
        places: Sequence[tuple[int, int]],
    ):
        (self._pool,) = pages
        self._batches, self._places = batches, places

    @property
    def pages(self) -> list[PagedKV]:
        return [self._pool]

    def layer(
        self, layer: Any, x: Float[Array, "T D"], rope: Rotation, index: int
    ) -> Float[Array, "T D"]:
        """The output of a `DecoderLayer`."""
        attn, mlp = layer.attn, layer.mlp
        group, place = self._places[index]
        batch = self._batches[group]
        x, self._pool = blocks.attention_block(
            x,
            _norm(layer.attn_norm),
            projection(attn.q),
            projection(attn.k),
            projection(attn.v),
            projection(attn.o),
            QKNorm(attn.q_norm.weight[...], attn.k_norm.weight[...]) if attn.qk_norm else None,
            rope,
            Residual(_norm(layer.attn_post_norm), layer.residual_scale),
            layer.norm_eps,
            self._pool,
            place,
            batch,
            attn.spec,
        )
        return blocks.mlp_block(
            x,
            _norm(layer.mlp_norm),
            projection(mlp.gate),
            projection(mlp.up),
            projection(mlp.down),
            mlp.activation,
            Residual(_norm(layer.mlp_post_norm), layer.residual_scale),
            layer.norm_eps,
            batch.query_starts[-1:],
        )


def projection(linear: Linear) -> Projection:
    """A linear layer of packed weights as native calls take it."""
    bias = None if linear.bias is None else linear.bias[...].astype(jnp.float32)
    return Projection(linear.weight.get_value(), bias)


def _norm(norm: RMSNorm | None) -> Float[Array, " D"] | None:
    return None if norm is None else norm.weight[...]
