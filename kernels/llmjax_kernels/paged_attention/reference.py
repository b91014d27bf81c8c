"""Paged attention in plain XLA: the definition, and the backend that runs anywhere.

Online softmax over blocks of pages (Milakov and Gimelshein, 2018; FlashAttention-2), with
loop bounds from the true lengths: the cost follows the tokens that are there, not the
bucket. Single-token runs are computed side by side, longer ones in tiles of queries, one
tile after the other.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..layout import PagedKV, RaggedBatch
from .args import AttentionArgs, AttentionSpec

TILE = 64
"""Queries of one sequence computed together."""
BLOCK = 128
"""Keys computed together, for single-token runs; tiles take four times as many."""
_MASKED = -1e30


def supports(args: AttentionArgs) -> bool:
    """All there is."""
    return True


def run(args: AttentionArgs) -> tuple[Float[Array, "T N H"], PagedKV]:
    q, k, v, kv, batch, spec, sinks = args
    kv = write_kv(k, v, kv, batch)
    tokens = q.shape[0]
    if batch.decode_only:
        rows = batch.kv_lens
        out = _attend(
            q[:, None], (rows - 1)[:, None], batch.block_tables, kv, spec, sinks, rows > 0, BLOCK
        )
        return out[:, 0].astype(q.dtype), kv
    out = jnp.zeros((tokens + TILE, *q.shape[1:]), jnp.float32)
    out = _attend_single_tokens(q, out, kv, batch, spec, sinks)
    out = _attend_tiles(q, out, kv, batch, spec, sinks)
    return out[:tokens].astype(q.dtype), kv


def write_kv(
    k: Float[Array, "T K H"], v: Float[Array, "T K H"], kv: PagedKV, batch: RaggedBatch
) -> PagedKV:
    """Stores each token's key and value at its position's place; padding stores nothing."""
    page_size = kv.page_size
    page = batch.block_tables[batch.token_seqs, batch.positions // page_size]
    # An index past the end is dropped by the scatter; that is how padding writes nothing.
    page = jnp.where(batch.is_token, page, kv.k.shape[0])
    place = (page, batch.positions % page_size)
    return PagedKV(
        k=kv.k.at[place].set(kv.format.encode(k), mode="drop"),
        v=kv.v.at[place].set(kv.format.encode(v), mode="drop"),
        format=kv.format,
    )


def _attend_single_tokens(q, out, kv, batch, spec, sinks):
    starts = batch.query_starts[:-1]
    single = batch.query_starts[1:] - starts == 1

    def compute(out):
        rows = _attend(
            q[starts][:, None],
            (batch.kv_lens - 1)[:, None],
            batch.block_tables,
            kv,
            spec,
            sinks,
            single,
            BLOCK,
        )
        return out.at[jnp.where(single, starts, out.shape[0])].set(rows[:, 0], mode="drop")

    return lax.cond(jnp.any(single), compute, lambda out: out, out)


def _attend_tiles(q, out, kv, batch, spec, sinks):
    query_lens = batch.query_starts[1:] - batch.query_starts[:-1]
    tiles_of_seq = jnp.where(query_lens > 1, -(-query_lens // TILE), 0)
    tile_ends = jnp.cumsum(tiles_of_seq)
    padded_q = jnp.pad(q, ((0, TILE), (0, 0), (0, 0)))
    lane = jnp.arange(TILE, dtype=jnp.int32)

    def one_tile(tile, out):
        seq = jnp.searchsorted(tile_ends, tile, side="right")
        offset = (tile - (tile_ends[seq] - tiles_of_seq[seq])) * TILE
        start = batch.query_starts[seq] + offset
        in_run = offset + lane < query_lens[seq]
        # Lanes past the run's end repeat its last position, so that they bound no loop.
        first = batch.kv_lens[seq] - query_lens[seq]
        position = jnp.minimum(first + offset + lane, batch.kv_lens[seq] - 1)
        tile_q = lax.dynamic_slice_in_dim(padded_q, start, TILE)
        result = _attend(
            tile_q[None],
            position[None],
            lax.dynamic_slice_in_dim(batch.block_tables, seq, 1),
            kv,
            spec,
            sinks,
            jnp.ones(1, bool),
            4 * BLOCK,
        )[0]
        old = lax.dynamic_slice_in_dim(out, start, TILE)
        result = jnp.where(in_run[:, None, None], result, old)
        return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    return lax.fori_loop(0, tile_ends[-1], one_tile, out)


def _attend(
    q: Float[Array, "B Q N H"],
    positions: Int[Array, "B Q"],
    block_tables: Int[Array, "B P"],
    kv: PagedKV,
    spec: AttentionSpec,
    sinks: Float[Array, " N"] | None,
    active: Array,
    block: int,
) -> Float[Array, "B Q N H"]:
    """Attention of B runs of Q consecutive queries; rows not active cost no iterations."""
    B, Q, N, H = q.shape
    K, W, page_size = kv.k.shape[2], kv.k.shape[3], kv.page_size
    pages_per_block = max(1, min(block // page_size, block_tables.shape[1]))
    grouped_q = q.reshape(B, Q, K, N // K, H)
    first_key = jnp.zeros(B, jnp.int32)
    if spec.window is not None:
        first_key = jnp.maximum(positions[:, 0] - spec.window + 1, 0)
    first_page = first_key // page_size
    pages = jnp.where(active, positions[:, -1] // page_size + 1 - first_page, 0)
    num_blocks = jnp.max(-(-pages // pages_per_block))

    def one_block(i, carry):
        acc, largest, total = carry
        page_index = first_page[:, None] + i * pages_per_block + jnp.arange(pages_per_block)
        last = block_tables.shape[1] - 1
        ids = jnp.take_along_axis(block_tables, jnp.minimum(page_index, last), axis=1)
        # Whole pages as flat rows: XLA's CPU gather copies those twice as fast.
        rows = [x.reshape(x.shape[0], -1)[ids].reshape(B, -1, K, W) for x in (kv.k, kv.v)]
        keys, values = (kv.format.decode(x, q.dtype) for x in rows)
        key_positions = page_index[:, :, None] * page_size + jnp.arange(page_size)
        key_positions = key_positions.reshape(B, 1, -1)
        seen = key_positions <= positions[:, :, None]
        if spec.window is not None:
            seen &= key_positions > positions[:, :, None] - spec.window
        # What a page holds where no query looks may be NaN, and 0 * NaN is NaN.
        values = jnp.where(jnp.any(seen, axis=1)[:, :, None, None], values, 0)
        scores = jnp.einsum(
            "bqkgh,bckh->bkgqc", grouped_q, keys, preferred_element_type=jnp.float32
        )
        scores *= spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * jnp.tanh(scores / spec.softcap)
        scores = jnp.where(seen[:, None, None], scores, _MASKED)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_largest[..., None])
        # A block in which a query sees nothing would weigh exp(0) each: mask again.
        weights = jnp.where(seen[:, None, None], weights, 0)
        shrink = jnp.exp(largest - new_largest)
        total = total * shrink + jnp.sum(weights, axis=-1)
        acc = acc * shrink[..., None] + jnp.einsum(
            "bkgqc,bckh->bkgqh",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return acc, new_largest, total

    heads = (B, K, N // K, Q)
    carry = (
        jnp.zeros((*heads, H), jnp.float32),
        jnp.full(heads, _MASKED, jnp.float32),
        jnp.zeros(heads, jnp.float32),
    )
    acc, largest, total = lax.fori_loop(0, num_blocks, one_block, carry)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(K, N // K, 1)
        new_largest = jnp.maximum(largest, sink)
        shrink = jnp.exp(largest - new_largest)
        acc, total = acc * shrink[..., None], total * shrink + jnp.exp(sink - new_largest)
    out = acc / jnp.maximum(total, 1e-30)[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(B, Q, N, H)
