"""A decoder layer in two calls, and what comes before and after it.

Rows of padding cost nothing: a call computes as many rows as hold tokens and clears the rest.
Arrays are float32 but for packed weights and pages. An absent array (no bias, no norm) is None.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct
from jaxtyping import Array, Float, Int

from ..kv_format import KVFormat
from ..layout import PagedKV, RaggedBatch
from ..packed import PackedWeight
from ..paged_attention import AttentionSpec

ACTIVATIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3}
KV_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2, "fp8_e4m3": 3, "fp8_e5m2": 4}
LANES, MOST_HEAD_DIM = 16, 512


class Projection(NamedTuple):
    """A linear layer's arrays."""

    weight: PackedWeight
    bias: Float[Array, " N"] | None = None


class Residual(NamedTuple):
    """How a block's output joins its input: x + scale * norm(output)."""

    post_norm: Float[Array, " D"] | None = None
    scale: float = 1.0


class QKNorm(NamedTuple):
    """Norm weights of queries and keys, over each head or over all of them."""

    q: Float[Array, " width"]
    k: Float[Array, " width"]


def shape_obstacle(head_dim: int, page_size: int) -> str | None:
    """Why attention of this shape has no native kernel; None: it has, for all of `KV_TYPES`."""
    if head_dim % LANES or head_dim > MOST_HEAD_DIM:
        return f"head_dim is {head_dim}, and they take multiples of {LANES} up to {MOST_HEAD_DIM}"
    if page_size % LANES:
        return f"block_size is {page_size}, and they take multiples of {LANES}"
    return None


def make_pages(
    num_layers: int,
    num_pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    format: KVFormat,
) -> PagedKV:
    """Pages of zeros, of all layers, in the layout of the native kernels.

    They take memory once they are written.

    Both arrays are [L, pages, K, page_size / 16, 16 W]: blocks of 16 positions, of keys
    [H, 16], so that one channel is one vector, of values [16, H]. The scales of a block, where
    there are any, follow its codes.
    """
    shape = (num_layers, num_pages, kv_heads, page_size // LANES, LANES * format.width(head_dim))
    return PagedKV(_zeros(shape, format.storage), _zeros(shape, format.storage), format)


def attention_block(
    x: Float[Array, "T D"],
    norm: Float[Array, " D"] | None,
    q: Projection,
    k: Projection,
    v: Projection,
    o: Projection,
    qk_norm: QKNorm | None,
    rope: tuple[Float[Array, "T R"], Float[Array, "T R"]],
    residual: Residual,
    eps: float,
    kv: PagedKV,
    layer: int,
    batch: RaggedBatch,
    spec: AttentionSpec,
) -> tuple[Float[Array, "T D"], PagedKV]:
    """Norm, QKV, rotary positions, KV write, attention, output projection, residual add.

    Args:
        kv: the pages of all layers (see `make_pages`).
        layer: which of them to write and read.
    """
    kv_heads, page_size = kv.k.shape[2], kv.k.shape[3] * LANES
    head_dim = k.weight.shape[0] // kv_heads
    args = (
        x,
        batch.query_starts,
        batch.kv_lens,
        batch.block_tables,
        *rope,
        _or_empty(norm),
        *(p.weight.data for p in (q, k, v, o)),
        *(_or_empty(p.bias) for p in (q, k, v, o)),
        _or_empty(qk_norm and qk_norm.q),
        _or_empty(qk_norm and qk_norm.k),
        _or_empty(residual.post_norm),
        kv.k,
        kv.v,
    )
    results = [_like(x), _like(kv.k), _like(kv.v)]
    pages = {len(args) - 2: 1, len(args) - 1: 2}
    call = jax.ffi.ffi_call("llmjax_attention_block", results, input_output_aliases=pages)
    out, new_k, new_v = call(
        *args,
        weights=_about(q, k, v, o),
        layer=np.int64(layer),
        head_dim=np.int64(head_dim),
        page_size=np.int64(page_size),
        kv_type=np.int64(KV_TYPES[kv.format.name]),
        window=np.int64(spec.window or 0),
        eps=np.float32(eps),
        scale=np.float32(spec.scale),
        softcap=np.float32(spec.softcap or 0),
        residual_scale=np.float32(residual.scale),
    )
    return out, PagedKV(new_k, new_v, kv.format)


def mlp_block(
    x: Float[Array, "T D"],
    norm: Float[Array, " D"] | None,
    gate: Projection,
    up: Projection,
    down: Projection,
    activation: str,
    residual: Residual,
    eps: float,
    num_tokens: Int[Array, " 1"],
) -> Float[Array, "T D"]:
    """Norm, gate and up, activation, down, residual add."""
    call = jax.ffi.ffi_call("llmjax_mlp_block", _like(x))
    return call(
        x,
        num_tokens,
        _or_empty(norm),
        *(p.weight.data for p in (gate, up, down)),
        *(_or_empty(p.bias) for p in (gate, up, down)),
        _or_empty(residual.post_norm),
        weights=_about(gate, up, down),
        activation=np.int64(ACTIVATIONS[activation]),
        eps=np.float32(eps),
        residual_scale=np.float32(residual.scale),
    )


def linear(
    x: Float[Array, "M K"], projection: Projection, num_rows: Int[Array, " 1"]
) -> Float[Array, "M N"]:
    """x W^T + b of the first `num_rows` rows."""
    shape = ShapeDtypeStruct((x.shape[0], projection.weight.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call("llmjax_linear", shape)
    args = (projection.weight.data, _or_empty(projection.bias))
    return call(x, num_rows, *args, weights=_about(projection))


def embed(tokens: Int[Array, " T"], weight: PackedWeight) -> Float[Array, "T D"]:
    """Rows of a packed table."""
    call = jax.ffi.ffi_call(
        "llmjax_embed", ShapeDtypeStruct((tokens.shape[0], weight.shape[1]), jnp.float32)
    )
    return call(tokens, weight.data, weights=_about(Projection(weight)))


def unpack(weight: PackedWeight) -> Float[Array, "N K"]:
    """The values of a packed weight."""
    return embed(jnp.arange(weight.shape[0], dtype=jnp.int32), weight)


def _zeros(shape: tuple[int, ...], dtype) -> Array:
    return jax.ffi.ffi_call("llmjax_zeros", ShapeDtypeStruct(shape, dtype))()


def _like(x: Array) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(x.shape, x.dtype)


def _or_empty(x: Array | None) -> Array:
    return jnp.zeros(0, jnp.float32) if x is None else x


def _about(*projections: Projection) -> np.ndarray:
    return np.array([p.weight.attributes for p in projections], np.int64).reshape(-1)
