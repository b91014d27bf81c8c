"""Prompts on Hopper, in Pallas Mosaic GPU; only mosaic_gpu.py imports this, where that is.

FlashAttention-3 (Shah et al., 2024) over pages (Kwon et al., 2023). A program is a tile: some
tokens of one run with all query heads of a kv head. One of its warpgroups fetches blocks of keys
and values (TMA). Two multiply (wgmma), each for half of the rows, and take turns: while one has the
matrix units, the other is at its softmax. Blocks that no query of the tile sees are not read, and
those that all see need no mask.

The rows of a tile are units of 8, as many as TMA moves: 8 tokens of one head. With `per_head` of
them for each head of the group, unit u is head u // per_head, tokens from 8 (u % per_head) on.
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

from .mosaic_common import (
    NOTHING,
    Arithmetic,
    Keys,
    capped,
    clear,
    full,
    iota,
    places,
    tiled,
    to_columns,
)
from .mosaic_gpu import PROMPT_KEYS, ROWS, TMA_ROWS, UNITS

WORKERS = 2
"""Warpgroups that multiply."""
UNITS_OF_ONE = UNITS // WORKERS
FEW, MANY = 40, 232
"""Registers of a thread that fetches, and of one that multiplies: 64512 in a program."""


class Tile(NamedTuple):
    """Attributes:
    start, first, stop, position: see `cut_into_tiles`.
    per_head: units of a head.
    """

    start: Any
    first: Any
    stop: Any
    position: Any
    per_head: int

    def head(self, unit):
        """Of the group; beyond it for units that are not used."""
        return lax.div(unit, self.per_head)

    def token(self, unit):
        """The first of a unit. What it has of other tiles' tokens is computed and not kept."""
        return self.start + lax.rem(unit, self.per_head) * TMA_ROWS

    def place(self, unit, head, group: int):
        """Where a unit comes from and goes to, in the kv head `head`; for one that is not used, of
        any query head."""
        token = pl.multiple_of(self.token(unit), TMA_ROWS)
        query_head = head * group + jnp.minimum(self.head(unit), group - 1)
        return pl.ds(token, TMA_ROWS), query_head

    def position_of(self, token):
        return self.position + token - self.start

    def keys(self, window: int) -> Keys:
        """Those that some token sees."""
        stop = jnp.maximum(self.position_of(self.stop), 0)
        lowest_query = self.position_of(self.first)
        bottom = jnp.maximum(lowest_query - window + 1, 0) if window else jnp.int32(0)
        lowest = lax.div(bottom, PROMPT_KEYS)
        blocks = lax.div(stop + PROMPT_KEYS - 1, PROMPT_KEYS) - lowest
        return Keys(bottom, stop, lowest * PROMPT_KEYS, blocks)

    def is_masked(self, key, window: int):
        """Whether some token does not see all of a block of keys, whose first is `key`."""
        masked = key + PROMPT_KEYS > self.position_of(self.first) + 1
        if window:
            masked |= key < self.position_of(self.stop) - window
        return masked


@partial(jax.jit, static_argnames=("arithmetic", "stages"))  # traced once for all layers
def attend(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "pages page_size K H"],
    v_pages: Float[Array, "pages page_size K H"],
    tiles: Int[Array, "tiles 5"],
    block_tables: Int[Array, "S P"],
    sinks: Float[Array, " N"],
    arithmetic: Arithmetic,
    stages: int,
) -> Float[Array, "T N H"]:
    """All tokens of a step over their keys.

    Args:
        tiles: of `tile_size(N // K)` tokens, see `cut_into_tiles`.
        sinks: in units of log 2; `NOTHING` is none.
        stages: blocks of keys in shared memory, and of values.
    """
    _, N, H = q.shape
    page_size, K = k_pages.shape[1:3]
    loaded = plgpu.Barrier(
        num_barriers=stages, num_arrivals=PROMPT_KEYS // min(page_size, PROMPT_KEYS)
    )
    used = plgpu.Barrier(num_barriers=stages, num_arrivals=WORKERS)
    rows = (WORKERS, ROWS, H)
    run = plgpu.kernel(
        partial(_attend_tile, arithmetic=arithmetic, group=N // K),
        out_type=ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[
            tiled(rows, q.dtype),
            tiled((stages, PROMPT_KEYS, H), q.dtype),
            tiled((stages, PROMPT_KEYS, H), q.dtype),
            tiled(rows, q.dtype),
            plgpu.SMEM((WORKERS * ROWS, H), q.dtype),
            plgpu.Barrier(num_barriers=WORKERS, num_arrivals=UNITS_OF_ONE),
            (loaded, loaded),
            (used, used),
            plgpu.Barrier(num_arrivals=WORKERS),
            plgpu.Barrier(num_arrivals=WORKERS),
        ],
        grid=(K, tiles.shape[0]),
        grid_names=("head", "tile"),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="attend_prompts",
    )
    return run(q, k_pages, v_pages, tiles, block_tables, sinks)


def _attend_tile(
    q, k_pages, v_pages, tiles, block_tables, sinks, out,
    q_smem, k_smem, v_smem, fast, by_row, q_loaded, loaded, used, turn, cleared,
    *, arithmetic: Arithmetic, group: int,
) -> None:  # fmt: skip
    """One warpgroup of a program.

    Args:
        fast, by_row: where results wait to be copied, 8 rows at once or one.
        loaded, used: for each slot of keys, and of values.
        turn: both that multiply pass it together: one has asked the matrix units for something,
            the other is about to.
        cleared: what no query sees of a block of values.
    """
    head, index, warpgroup = map(lax.axis_index, ("head", "tile", "warpgroup"))
    seq, start, first, stop, position = (tiles[index, i] for i in range(5))
    tile = Tile(start, first, stop, position, UNITS // group)
    keys = tile.keys(arithmetic.window)
    stages = k_smem.shape[0]

    @pl.when(warpgroup == WORKERS)
    def fetch():
        plgpu.set_max_registers(FEW, action="decrease")

        def fetch_block(step, _):
            slot, key = lax.rem(step, stages), keys.first + step * PROMPT_KEYS
            found = [*places(block_tables, seq, key, keys, k_pages.shape[1], PROMPT_KEYS)]
            for i, (pages, smem) in enumerate(((k_pages, k_smem), (v_pages, v_smem))):

                def copy(pages=pages, smem=smem, barrier=loaded[i].at[slot]):
                    for rows, (page, source) in found:
                        plgpu.copy_gmem_to_smem(
                            pages.at[page, source, head], smem.at[slot, rows], barrier
                        )

                # Behind the last block, too: no barrier is left that nobody waited for.
                pl.when(step >= stages)(partial(plgpu.barrier_wait, used[i].at[slot]))
                pl.when(step < keys.count)(copy)

        lax.fori_loop(0, keys.count + stages, fetch_block, None)

    @pl.when(warpgroup < WORKERS)
    def multiply():
        plgpu.set_max_registers(MANY, action="increase")
        units = [warpgroup * UNITS_OF_ONE + i for i in range(UNITS_OF_ONE)]
        for i, unit in enumerate(units):
            rows = q_smem.at[warpgroup, pl.ds(i * TMA_ROWS, TMA_ROWS)]
            source = q.at[tile.place(unit, head, group)]
            plgpu.copy_gmem_to_smem(source, rows, q_loaded.at[warpgroup])
        plgpu.barrier_wait(q_loaded.at[warpgroup])
        attend_block = partial(
            _attend_block, tile, keys, arithmetic, warpgroup,
            q_smem, k_smem, v_smem, loaded, used, turn, cleared,
        )  # fmt: skip
        pl.when(warpgroup == 1)(partial(_take_turn, turn))
        carry = (full((ROWS, q.shape[2]), 0.0), full((ROWS,), NOTHING), full((ROWS,), 0.0))
        result, largest, total = lax.fori_loop(0, keys.count, attend_block, carry)
        pl.when(warpgroup == 0)(partial(_take_turn, turn))
        sink = _sinks_of(tile, sinks, head, group, warpgroup)
        top = jnp.maximum(largest, sink)
        shrink = jnp.exp2(largest - top)
        total = total * shrink + jnp.exp2(sink - top)
        result = result * to_columns(shrink / jnp.maximum(total, 1e-30), result.shape)
        _write(tile, units, head, group, result.astype(q.dtype), warpgroup, fast, by_row, out)


def _attend_block(
    tile, keys, arithmetic, warpgroup,
    q_smem, k_smem, v_smem, loaded, used, turn, cleared, step, carry,
):  # fmt: skip
    """One more block of keys in the result, the greatest score and the sum of weights."""
    out, largest, total = carry
    slot, key = lax.rem(step, k_smem.shape[0]), keys.first + step * PROMPT_KEYS
    k_loaded, v_loaded = loaded
    k_used, v_used = used
    plgpu.barrier_wait(k_loaded.at[slot])
    scores = _scores(q_smem.at[warpgroup], k_smem.at[slot], turn)
    plgpu.barrier_arrive(k_used.at[slot])
    # What is left to multiply by, in one instruction with the subtraction below.
    scale = 1.0 if arithmetic.cap else arithmetic.scale
    if arithmetic.cap:
        scores = capped(scores * arithmetic.scale, arithmetic.cap)
    scores = lax.cond(
        tile.is_masked(key, arithmetic.window),
        lambda: _masked(tile, scores, key, arithmetic.window, warpgroup),
        lambda: scores,
    )
    new_largest = jnp.maximum(largest, scores.max(axis=1) * scale)
    shrink = jnp.exp2(largest - new_largest)
    weights = jnp.exp2(scores * scale - to_columns(new_largest, scores.shape))
    total = total * shrink + weights.sum(axis=1)
    out = out * to_columns(shrink, out.shape)
    # All of this before the turn is handed over, or the compiler puts some of it behind.
    done = (out, total, weights.astype(v_smem.dtype))
    out, total, weights = lax.optimization_barrier(done)
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(v_loaded.at[slot])
    is_ragged = keys.is_ragged(key, PROMPT_KEYS)

    @pl.when(is_ragged)
    def clear_half():
        half = PROMPT_KEYS // WORKERS
        first = warpgroup * half
        clear(v_smem.at[slot, pl.ds(first, half)], key + first, keys)
        plgpu.commit_smem()
        plgpu.barrier_arrive(cleared)

    plgpu.barrier_wait(turn)
    pl.when(is_ragged)(partial(plgpu.barrier_wait, cleared))
    out = _add_product(out, weights, v_smem.at[slot])
    plgpu.barrier_arrive(v_used.at[slot])
    return out, new_largest, total


def _scores(q, keys, turn):
    def multiply(acc):
        plgpu.wgmma(acc, q, keys.T)
        _take_turn(turn)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, PROMPT_KEYS), jnp.float32))


def _add_product(out, weights, values):
    """out + weights @ values, in the registers of both; values are in shared memory.

    Jax's interpreter of Mosaic GPU has neither: the tests put plain arithmetic in its place.
    """

    def multiply(acc):
        plgpu.wgmma(acc, weights, values)

    return pl.run_state(multiply)(plgpu.ACC.init(out))


def _take_turn(turn) -> None:
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(turn)


def _masked(tile: Tile, scores, key, window: int, warpgroup):
    """Scores, less than any where a token does not see a key."""
    row = _row()
    unit = warpgroup * UNITS_OF_ONE + lax.div(row, TMA_ROWS)
    token = tile.token(unit) + lax.rem(row, TMA_ROWS)
    position = to_columns(tile.position_of(token), scores.shape)
    keys = key + iota(scores.shape, 1)
    seen = keys <= position
    if window:
        seen &= keys > position - window
    return jnp.where(seen, scores, -jnp.inf)


def _sinks_of(tile: Tile, sinks, head, group: int, warpgroup):
    """Of each row."""
    heads = tile.head(warpgroup * UNITS_OF_ONE + lax.div(_row(), TMA_ROWS))
    found = full((ROWS,), NOTHING)
    for i in range(group):
        found = jnp.where(heads == i, sinks[head * group + i], found)
    return found


def _write(tile: Tile, units, head, group: int, result, warpgroup, fast, by_row, out) -> None:
    """Those rows of a result that are the tile's. TMA moves 8 at once where all are."""
    size = tile.per_head * TMA_ROWS

    @pl.when(tile.stop - tile.first == size)
    def write_whole():
        fast[warpgroup] = result
        plgpu.commit_smem()
        for i, unit in enumerate(units):
            rows = fast.at[warpgroup, pl.ds(i * TMA_ROWS, TMA_ROWS)]
            place = out.at[tile.place(unit, head, group)]
            pl.when(tile.head(unit) < group)(partial(plgpu.copy_smem_to_gmem, rows, place))

    @pl.when(tile.stop - tile.first < size)
    def write_some():
        by_row[pl.ds(warpgroup * ROWS, ROWS)] = result
        plgpu.commit_smem()
        for i, unit in enumerate(units):
            token = tile.token(unit)
            _, query_head = tile.place(unit, head, group)

            def write(step, _, i=i, token=token, query_head=query_head):
                row = warpgroup * ROWS + i * TMA_ROWS + step - token
                place = out.at[pl.ds(step, 1), query_head]
                plgpu.copy_smem_to_gmem(by_row.at[pl.ds(row, 1)], place)

            first = jnp.maximum(token, tile.first)
            stop = jnp.minimum(token + TMA_ROWS, tile.stop)
            stop = jnp.where(tile.head(unit) < group, jnp.maximum(stop, first), first)
            lax.fori_loop(first, stop, write, None)

    plgpu.wait_smem_to_gmem(0)


def _row():
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
