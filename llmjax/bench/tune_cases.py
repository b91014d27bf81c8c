"""What `llmjax tune` times of a model: products with quantised weights, and attention."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax_kernels.gpu import Gpu
from llmjax_kernels.kv_format import KVFormat
from llmjax_kernels.layout import PagedKV, make_ragged_batch
from llmjax_kernels.paged_attention import jax_triton as attention_kernels
from llmjax_kernels.paged_attention import shapes as attention
from llmjax_kernels.paged_attention.args import AttentionArgs, AttentionSpec
from llmjax_kernels.quant_matmul import format_here, weight_shapes
from llmjax_kernels.quant_matmul import jax_triton as product_kernels
from llmjax_kernels.quant_matmul import shapes as products
from llmjax_kernels.quant_matmul.args import QuantMatmulArgs
from llmjax_kernels.weight_format import QUANTISATIONS

from ..engine.buckets import Bucket
from ..models import Decoder, DecoderConfig

log = logging.getLogger(__name__)

CACHED = 1 << 28
"""Bytes: several times a GPU's L2 cache, out of which nothing is to come."""
MOST_PAGES = 1 << 31
"""Bytes of keys, and of values as many: longer contexts share pages."""
RUNS = 20
S = TypeVar("S")


class Case(NamedTuple, Generic[S]):
    """One size of one op.

    Attributes:
        op, size: under which a shape is kept.
        start: the shape by rule.
        near: shapes that differ in one field from one.
        seconds: what it takes in a shape; infinite where it cannot be computed so.
    """

    op: str
    size: str
    start: S
    near: Callable[[S], Iterable[S]]
    seconds: Callable[[S], float]


def products_of(
    config: DecoderConfig, quantization: str, rows: Iterable[int]
) -> list[QuantMatmulArgs]:
    """Shapes of the products of a decoder, each size once."""
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, jnp.dtype(jnp.bfloat16))))
    head = "embed" if config.tie_embeddings else "head"
    found: dict[str, QuantMatmulArgs] = {}
    for path, leaf in nnx.to_flat_state(state):
        name, ends = quantization, path[0] in ("embed", "head")
        if len(leaf.shape) != 2 or (ends and (path[0] != head or name not in QUANTISATIONS)):
            continue
        format = format_here("int8" if ends else name)
        for M in rows:
            N, K = leaf.shape
            x = jax.eval_shape(partial(jnp.zeros, (M, K), jnp.bfloat16))
            out_dtype = jnp.dtype(jnp.float32 if ends else jnp.bfloat16)
            args = QuantMatmulArgs(x, weight_shapes(N, K, format), out_dtype)
            found.setdefault(products.size_of(args), args)
    return list(found.values())


def attentions_of(
    config: DecoderConfig, format: KVFormat, buckets: Iterable[Bucket], block_size: int
) -> list[AttentionArgs]:
    """Shapes of the attention of steps, each size once. A layer that sees all stands for others."""
    window = None if None in config.windows else max(filter(None, config.windows))
    spec = AttentionSpec(config.attention_scale, window, config.attention_softcap)
    found: dict[str, AttentionArgs] = {}
    for bucket in buckets:
        make = partial(_step, config, format, bucket, block_size)
        q, k, kv, batch = jax.eval_shape(make)
        args = AttentionArgs(q, k, k, kv, batch, spec)
        found.setdefault(attention.size_of(args), args)
    return list(found.values())


def product_case(args: QuantMatmulArgs, gpu: Gpu) -> Case[products.Shape]:
    def seconds(shape: products.Shape) -> float:
        def product(x: jax.Array, weight: Any) -> jax.Array:
            return product_kernels.run_as(args._replace(x=x, weight=weight), shape, gpu)

        return _timed(product, (jnp.ones(args.x.shape, args.x.dtype),), args.weight, shape)

    start, near = products.by_rule(args, gpu), partial(products.candidates, args)
    return Case(products.OP, products.size_of(args), start, near, seconds)


def attention_case(args: AttentionArgs, gpu: Gpu) -> Case[attention.Shape]:
    def seconds(shape: attention.Shape) -> float:
        def attend(q: jax.Array, batch: Any, kv: PagedKV) -> jax.Array:
            now = args._replace(q=q, batch=batch, kv=kv)
            return attention_kernels.attend_as(now, shape, gpu)

        q = jnp.ones(args.q.shape, args.q.dtype)
        return _timed(attend, (q, _full(args)), args.kv, shape)

    start, near = attention.by_rule(args, gpu), partial(attention.candidates, args)
    return Case(attention.OP, attention.size_of(args), start, near, seconds)


def _step(
    config: DecoderConfig, format: KVFormat, bucket: Bucket, block_size: int
) -> tuple[Any, ...]:
    """The arrays of one layer's attention in a step of a bucket."""
    T, S, P = bucket
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    row = K * format.row_bytes(H)
    num_pages = max(1, min(S * P, MOST_PAGES // (row * block_size)))
    pages = jnp.zeros((num_pages, block_size, K, format.width(H)), format.storage)
    q, k = jnp.zeros((T, N, H), jnp.bfloat16), jnp.zeros((T, K, H), jnp.bfloat16)
    batch = _batch(T, S, P, block_size, num_pages, decode_only=bucket.decode_only)
    return q, k, PagedKV(pages, pages, format), batch


def _full(args: AttentionArgs) -> Any:
    """A step that fills its bucket: contexts are as long as there is room for."""
    S, P = args.batch.block_tables.shape
    num_pages, block_size = args.kv.k.shape[:2]
    decode_only = args.batch.decode_only
    return _batch(args.q.shape[0], S, P, block_size, num_pages, decode_only=decode_only)


def _batch(T: int, S: int, P: int, block_size: int, num_pages: int, *, decode_only: bool) -> Any:
    """One prompt, or the end of one, beside decodes, or decodes alone."""
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.arange(T - S + 1, T + 1)])
    tables = jnp.arange(S * P, dtype=jnp.int32).reshape(S, P) % num_pages
    lens = jnp.full(S, max(P * block_size, T - S + 1), jnp.int32)
    return make_ragged_batch(starts.astype(jnp.int32), lens, tables, T, decode_only=decode_only)


def _timed(
    function: Callable[..., jax.Array], inputs: Sequence[Any], read: Any, shape: object
) -> float:
    """Of one call on the device, whose last argument is read from memory."""

    def zeros() -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), read)

    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(read))
    copies = [zeros() for _ in range(max(2, CACHED // size))]
    try:
        compiled = jax.jit(function).lower(*inputs, copies[0]).compile()
        jax.block_until_ready(compiled(*inputs, copies[0]))
    except jax.errors.JaxRuntimeError as error:  # too much shared memory, say
        log.debug("%s: %s", shape, error)
        return math.inf
    began = time.perf_counter()
    results = [compiled(*inputs, copies[i % len(copies)]) for i in range(RUNS)]
    jax.block_until_ready(results)
    return (time.perf_counter() - began) / RUNS
