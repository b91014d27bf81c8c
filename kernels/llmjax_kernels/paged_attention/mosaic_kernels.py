"""Decoding on Hopper, in Pallas Mosaic GPU; only mosaic_gpu.py imports this, where that is.

Flash-Decoding (Dao et al., 2023) over pages (Kwon et al., 2023). A program is one split of the keys
of one sequence, for all query heads of a kv head. Pages come through shared memory by TMA, some
blocks of keys ahead of the one that is multiplied (wgmma). A warpgroup has registers for 128
channels of the result; of wider heads two share the keys, and each computes all scores.

Mosaic puts a barrier of the warpgroup before each copy and around each store, so that no warp
overwrites what another of its warpgroup still reads. Not so between warpgroups.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from .mosaic_gpu import KEYS, ROWS, TMA_ROWS

TILE = 64
"""Channels of a tile in shared memory: 128 bytes, which are swizzled."""
MOST_CHANNELS = 128
"""Of a result in the registers of a warpgroup."""
NOTHING = -1e30
"""Less than any score; finite, so that the difference of two is a number."""


class Arithmetic(NamedTuple):
    """Attributes:
    scale, cap: see `jax_triton.scale_and_cap`; 0 is no cap.
    window: 0 is none.
    """

    scale: float
    cap: float
    window: int


class Cut(NamedTuple):
    """How the work is cut.

    Attributes:
        splits: programs that share the keys of a sequence.
        stages: blocks of keys in shared memory.
        least: blocks of a split.
    """

    splits: int
    stages: int
    least: int


@partial(jax.jit, static_argnames=("arithmetic", "cut"))  # traced once for all layers
def attend(
    q: Float[Array, "S K group H"],
    k_pages: Float[Array, "pages page_size K H"],
    v_pages: Float[Array, "pages page_size K H"],
    kv_lens: Int[Array, " S"],
    block_tables: Int[Array, "S P"],
    arithmetic: Arithmetic,
    cut: Cut,
) -> tuple[
    Float[Array, "S N splits H"], Float[Array, "S K splits rows"], Float[Array, "S K splits rows"]
]:
    """The last token of each sequence over its keys, in parts.

    Returns:
        For each split the weighted sum of values in float32, not divided by the sum of weights
        (and not written where a split has no keys); the greatest score; the sum of weights. Rows
        of the latter two are those of the group, then arbitrary ones.
    """
    S, K, group, H = q.shape
    width = min(H, MOST_CHANNELS)
    warpgroups = H // width
    moved = -(-group // TMA_ROWS) * TMA_ROWS
    q = jnp.pad(q, ((0, 0), (0, 0), (0, moved - group), (0, 0)))
    copied = min(k_pages.shape[1], KEYS)

    def shared(*shape, dtype=q.dtype):
        tiled = (plgpu.TilingTransform((TMA_ROWS, TILE)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(shape, dtype, transforms=tiled if dtype == q.dtype else ())

    kv = shared(cut.stages, warpgroups, KEYS, width)
    sums = ShapeDtypeStruct((S, K, cut.splits, ROWS), jnp.float32)
    run = plgpu.kernel(
        partial(_attend_decodes, arithmetic=arithmetic, cut=cut, group=group, copied=copied),
        out_type=[ShapeDtypeStruct((S, K * group, cut.splits, H), jnp.float32), sums, sums],
        scratch_types=[
            shared(warpgroups, ROWS, width),
            shared(warpgroups, ROWS, KEYS),
            plgpu.RefUnion([kv, kv], shared(warpgroups, ROWS, width, dtype=jnp.float32)),
            plgpu.Barrier(num_arrivals=warpgroups),
            plgpu.Barrier(num_barriers=cut.stages, num_arrivals=2 * (KEYS // copied) * warpgroups),
            plgpu.Barrier(num_arrivals=warpgroups),
        ],
        grid=(cut.splits, K, S),
        grid_names=("split", "head", "seq"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="attend_decodes",
    )
    return tuple(run(q, k_pages, v_pages, kv_lens, block_tables))


def _attend_decodes(
    q, k_pages, v_pages, kv_lens, block_tables, parts, part_largest, part_total,
    q_smem, weights_smem, kv_or_result, q_loaded, loaded, used,
    *, arithmetic: Arithmetic, cut: Cut, group: int, copied: int,
) -> None:  # fmt: skip
    """One warpgroup of a program.

    Args:
        q_smem: in this and all of shared memory, each warpgroup's channels lie together.
        kv_or_result: the result takes the place of keys and values.
        used: a block of keys, by all warpgroups.
        copied: keys of a page that TMA moves at once.
    """
    split, head, seq, warpgroup = map(lax.axis_index, ("split", "head", "seq", "warpgroup"))
    (k_smem, v_smem), result = kv_or_result
    page_size, (_, warpgroups, _, width) = k_pages.shape[1], k_smem.shape
    channels = pl.ds(warpgroup * width, width)
    keys = _keys_of(kv_lens[seq], split, arithmetic.window, cut)

    def load(step):
        """Of this warpgroup's channels. In the place of pages that no query sees come the first
        or the last that one does: what a table says of others need not be read any more."""
        slot = lax.rem(step, cut.stages)
        seen = (lax.div(keys.bottom, page_size), lax.div(keys.stop - 1, page_size))
        for offset in range(0, KEYS, copied):
            key = keys.first + step * KEYS + offset
            page = block_tables[seq, jnp.clip(lax.div(key, page_size), *seen)]
            rows = (page, pl.ds(lax.rem(key, page_size), copied), head, channels)
            place = (slot, warpgroup, pl.ds(offset, copied))
            for pages, smem in ((k_pages, k_smem), (v_pages, v_smem)):
                plgpu.copy_gmem_to_smem(pages.at[rows], smem.at[place], loaded.at[slot])

    def attend_block(step, carry):
        out, largest, total = carry
        slot, key = lax.rem(step, cut.stages), keys.first + step * KEYS
        plgpu.barrier_wait(loaded.at[slot])
        pairs = [(q_smem.at[i], k_smem.at[slot, i].T) for i in range(warpgroups)]
        scores = _capped(_product(pairs, KEYS) * arithmetic.scale, arithmetic.cap)
        scores = jnp.where(keys.seen(key + _iota((ROWS, KEYS), 1)), scores, NOTHING)
        new_largest = jnp.maximum(largest, scores.max(axis=1))
        shrink = jnp.exp2(largest - new_largest)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_largest, scores.shape, [0]))
        total = total * shrink + weights.sum(axis=1)
        weights_smem[warpgroup] = weights.astype(q.dtype)
        values = v_smem.at[slot, warpgroup]
        is_ragged = (key < keys.bottom) | (key + KEYS > keys.stop)
        pl.when(is_ragged)(partial(_clear, values, key, keys))
        plgpu.commit_smem()
        out = out * lax.broadcast_in_dim(shrink, out.shape, [0])
        out += _product([(weights_smem.at[warpgroup], values)], width)
        # What comes into the place of this block overwrites keys that all warpgroups read.
        plgpu.barrier_arrive(used)
        plgpu.barrier_wait(used)
        pl.when(step + cut.stages < keys.count)(partial(load, step + cut.stages))
        return out, new_largest, total

    def write_sums(largest, total):
        @pl.when(warpgroup == 0)  # they all have the same
        def write():
            part_largest[seq, head, split] = largest
            part_total[seq, head, split] = total

    @pl.when(keys.count > 0)
    def attend_keys():
        rows = pl.ds(0, q.shape[2])
        plgpu.copy_gmem_to_smem(q.at[seq, head, :, channels], q_smem.at[warpgroup, rows], q_loaded)
        for step in range(cut.stages):
            pl.when(step < keys.count)(partial(load, jnp.int32(step)))
        plgpu.barrier_wait(q_loaded)
        carry = (_full((ROWS, width), 0.0), _full((ROWS,), NOTHING), _full((ROWS,), 0.0))
        out, largest, total = lax.fori_loop(0, keys.count, attend_block, carry)
        write_sums(largest, total)
        result[warpgroup] = out
        plgpu.commit_smem()
        place = parts.at[seq, pl.ds(head * group, group), split, channels]
        plgpu.copy_smem_to_gmem(result.at[warpgroup, pl.ds(0, group)], place)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(keys.count <= 0)
    def attend_nothing():
        write_sums(_full((ROWS,), NOTHING), _full((ROWS,), 0.0))


class _Keys(NamedTuple):
    """Attributes:
    bottom, stop: what the query sees: the first key, and the one behind the last.
    first: of the split, where a block begins.
    count: blocks of the split.
    """

    bottom: Any
    stop: Any
    first: Any
    count: Any

    def seen(self, key):
        return (key >= self.bottom) & (key < self.stop)


def _keys_of(length, split, window: int, cut: Cut) -> _Keys:
    bottom = jnp.maximum(length - window, 0) if window else jnp.int32(0)
    lowest = lax.div(bottom, KEYS)
    blocks = lax.div(length + KEYS - 1, KEYS) - lowest
    share = jnp.maximum(lax.div(blocks + cut.splits - 1, cut.splits), cut.least)
    begin = jnp.minimum(split * share, blocks)
    count = jnp.minimum(begin + share, blocks) - begin
    return _Keys(bottom, length, (lowest + begin) * KEYS, count)


def _clear(values, key, keys: _Keys) -> None:
    """What no query sees may be NaN, and 0 * NaN is NaN."""
    for channel in range(0, values.shape[1], TILE):
        tile = values.at[:, pl.ds(channel, TILE)]
        tile[...] = jnp.where(keys.seen(key + _iota((KEYS, TILE), 0)), tile[...], 0)


def _product(pairs, columns: int):
    """The sum of the products of matrices in shared memory, in float32."""

    def multiply(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, columns), jnp.float32))


def _capped(scores, cap: float):
    if not cap:
        return scores
    shrunk = jnp.exp2(-jnp.abs(scores))
    tanh = (1 - shrunk) / (1 + shrunk)
    return jnp.where(scores < 0, -tanh, tanh) * cap


def _iota(shape: tuple[int, int], axis: int):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _full(shape: tuple[int, ...], value: float):
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
