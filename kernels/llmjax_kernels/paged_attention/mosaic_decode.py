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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from .mosaic_common import (
    NOTHING,
    Arithmetic,
    Keys,
    capped,
    clear,
    full,
    iota,
    places,
    product,
    tiled,
    to_columns,
)
from .mosaic_gpu import KEYS, ROWS, TMA_ROWS

MOST_CHANNELS = 128
"""Of a result in the registers of a warpgroup."""


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
    copies = KEYS // min(k_pages.shape[1], KEYS)
    kv = tiled((cut.stages, warpgroups, KEYS, width), q.dtype)
    sums = ShapeDtypeStruct((S, K, cut.splits, ROWS), jnp.float32)
    run = plgpu.kernel(
        partial(_attend_decodes, arithmetic=arithmetic, cut=cut, group=group),
        out_type=[ShapeDtypeStruct((S, K * group, cut.splits, H), jnp.float32), sums, sums],
        scratch_types=[
            tiled((warpgroups, ROWS, width), q.dtype),
            tiled((warpgroups, ROWS, KEYS), q.dtype),
            plgpu.RefUnion([kv, kv], plgpu.SMEM((warpgroups, ROWS, width), jnp.float32)),
            plgpu.Barrier(num_arrivals=warpgroups),
            plgpu.Barrier(num_barriers=cut.stages, num_arrivals=2 * copies * warpgroups),
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
    *, arithmetic: Arithmetic, cut: Cut, group: int,
) -> None:  # fmt: skip
    """One warpgroup of a program.

    Args:
        q_smem: in this and all of shared memory, each warpgroup's channels lie together.
        kv_or_result: the result takes the place of keys and values.
        used: a block of keys, by all warpgroups.
    """
    split, head, seq, warpgroup = map(lax.axis_index, ("split", "head", "seq", "warpgroup"))
    (k_smem, v_smem), result = kv_or_result
    page_size, (_, warpgroups, _, width) = k_pages.shape[1], k_smem.shape
    channels = pl.ds(warpgroup * width, width)
    keys = _keys_of(kv_lens[seq], split, arithmetic.window, cut)

    def load(step):
        """Of this warpgroup's channels."""
        slot, key = lax.rem(step, cut.stages), keys.first + step * KEYS
        for rows, (page, source) in places(block_tables, seq, key, keys, page_size, KEYS):
            for pages, smem in ((k_pages, k_smem), (v_pages, v_smem)):
                place = smem.at[slot, warpgroup, rows]
                plgpu.copy_gmem_to_smem(
                    pages.at[page, source, head, channels], place, loaded.at[slot]
                )

    def attend_block(step, carry):
        out, largest, total = carry
        slot, key = lax.rem(step, cut.stages), keys.first + step * KEYS
        plgpu.barrier_wait(loaded.at[slot])
        pairs = [(q_smem.at[i], k_smem.at[slot, i].T) for i in range(warpgroups)]
        scores = capped(product(pairs, KEYS) * arithmetic.scale, arithmetic.cap)
        scores = jnp.where(keys.seen(key + iota((ROWS, KEYS), 1)), scores, NOTHING)
        new_largest = jnp.maximum(largest, scores.max(axis=1))
        shrink = jnp.exp2(largest - new_largest)
        weights = jnp.exp2(scores - to_columns(new_largest, scores.shape))
        total = total * shrink + weights.sum(axis=1)
        weights_smem[warpgroup] = weights.astype(q.dtype)
        values = v_smem.at[slot, warpgroup]
        pl.when(keys.is_ragged(key, KEYS))(partial(clear, values, key, keys))
        plgpu.commit_smem()
        out = out * to_columns(shrink, out.shape)
        out += product([(weights_smem.at[warpgroup], values)], width)
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
        carry = (full((ROWS, width), 0.0), full((ROWS,), NOTHING), full((ROWS,), 0.0))
        out, largest, total = lax.fori_loop(0, keys.count, attend_block, carry)
        write_sums(largest, total)
        result[warpgroup] = out
        plgpu.commit_smem()
        place = parts.at[seq, pl.ds(head * group, group), split, channels]
        plgpu.copy_smem_to_gmem(result.at[warpgroup, pl.ds(0, group)], place)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(keys.count <= 0)
    def attend_nothing():
        write_sums(full((ROWS,), NOTHING), full((ROWS,), 0.0))


def _keys_of(length, split, window: int, cut: Cut) -> Keys:
    bottom = jnp.maximum(length - window, 0) if window else jnp.int32(0)
    lowest = lax.div(bottom, KEYS)
    blocks = lax.div(length + KEYS - 1, KEYS) - lowest
    share = jnp.maximum(lax.div(blocks + cut.splits - 1, cut.splits), cut.least)
    begin = jnp.minimum(split * share, blocks)
    count = jnp.minimum(begin + share, blocks) - begin
    return Keys(bottom, length, (lowest + begin) * KEYS, count)
