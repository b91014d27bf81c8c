"""Self-attention, and the two ways to keep what it has seen: in pages, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from llmjax_kernels.layout import PagedKV, RaggedBatch
from llmjax_kernels.paged_attention import AttentionSpec, paged_attention

from ..parallel.rules import HEADS, KV_PAGES
from .linear import Linear
from .norm import RMSNorm
from .rope import Rotation, rotate


@runtime_checkable
class AttentionContext(Protocol):
    """What a layer's queries attend to."""

    def attend(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        spec: AttentionSpec,
    ) -> Float[Array, "T N H"]: ...


class PagedContext:
    """The sequences of a ragged step; `pages` holds the updated pages afterwards.

    Args:
        pages: a pool for each layer of a group.
        batches: of each group; they differ in their block tables.
        places: group and index in it of each layer.
        mesh: of several devices, each of which attends with its own heads.
    """

    def __init__(
        self,
        pages: list[PagedKV],
        batches: Sequence[RaggedBatch],
        places: Sequence[tuple[int, int]],
        mesh: Mesh | None = None,
    ):
        self.pages = list(pages)
        self._batches, self._places, self._mesh = batches, places, mesh

    def attend(self, layer, q, k, v, spec):
        group, index = self._places[layer]
        pool, batch = self.pages[index], self._batches[group]
        attention = partial(paged_attention, spec=spec)
        if self._mesh is not None:
            attention = jax.shard_map(
                attention,
                mesh=self._mesh,
                in_specs=(HEADS, HEADS, HEADS, KV_PAGES, PartitionSpec()),
                out_specs=(HEADS, KV_PAGES),
                check_vma=False,
            )
        out, self.pages[index] = attention(q, k, v, pool, batch)
        return out


class DenseContext:
    """One sequence computed whole, differentiable; keeps no keys or values.

    Args:
        keep_weights: collect each layer's attention weights, [N, T, T], in `weights`.
    """

    def __init__(self, keep_weights: bool = False):
        self.keep_weights = keep_weights
        self.weights: list[Float[Array, "N T T"]] = []

    def attend(self, layer, q, k, v, spec):
        T, N, _ = q.shape
        out, weights = attend_densely(q, k, v, spec, jnp.arange(T))
        if self.keep_weights:
            self.weights.append(weights.reshape(N, T, T))
        return out


def attend_densely(
    q: Float[Array, "T N H"],
    k: Float[Array, "C K H"],
    v: Float[Array, "C K H"],
    spec: AttentionSpec,
    positions: Int[Array, " T"],
) -> tuple[Float[Array, "T N H"], Float[Array, "K G T C"]]:
    """Attention of queries at some positions to keys at 0 to C - 1, and its weights in float32."""
    T, N, H = q.shape
    K = k.shape[1]
    grouped = q.reshape(T, K, N // K, H)
    scores = jnp.einsum("qkgh,ckh->kgqc", grouped, k, preferred_element_type=jnp.float32)
    scores *= spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    distance = positions[:, None] - jnp.arange(k.shape[0])[None, :]
    seen = distance >= 0
    if spec.window is not None:
        seen &= distance < spec.window
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    # What nobody sees weighs nothing, whatever it is.
    v = jnp.where(jnp.any(seen, axis=0)[:, None, None], v, 0)
    out = jnp.einsum("kgqc,ckh->qkgh", weights.astype(v.dtype), v)
    return out.reshape(T, N, H), weights


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions.

    Args:
        qk_norm: see `DecoderConfig.qk_norm`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        spec: AttentionSpec,
        *,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: Literal["head", "full"] | None,
        norm_eps: float,
        dtype: jnp.dtype,
    ):
        self.heads, self.head_dim, self.spec, self.qk_norm = num_heads, head_dim, spec, qk_norm
        self.kv_heads = num_kv_heads
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        self.q = Linear(hidden_size, width, bias=qkv_bias, dtype=dtype)
        self.k = Linear(hidden_size, kv_width, bias=qkv_bias, dtype=dtype)
        self.v = Linear(hidden_size, kv_width, bias=qkv_bias, dtype=dtype)
        self.o = Linear(width, hidden_size, bias=o_bias, dtype=dtype)
        if qk_norm:
            self.q_norm = RMSNorm(head_dim if qk_norm == "head" else width, norm_eps)
            self.k_norm = RMSNorm(head_dim if qk_norm == "head" else kv_width, norm_eps)

    def __call__(
        self, x: Float[Array, "T D"], rope: Rotation, layer: int, context: AttentionContext
    ) -> Float[Array, "T D"]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.reshape(-1, self.heads, self.head_dim)
        k = k.reshape(-1, self.kv_heads, self.head_dim)
        v = v.reshape(-1, self.kv_heads, self.head_dim)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        out = context.attend(layer, rotate(q, rope), rotate(k, rope), v, self.spec)
        return self.o(out.reshape(x.shape[0], -1))
