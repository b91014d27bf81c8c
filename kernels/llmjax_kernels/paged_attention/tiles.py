"""How the tokens of a step are cut into tiles, none of which has tokens of two runs."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from ..layout import RaggedBatch

ALIGNED = 8
"""Tokens that TMA moves at once, from a multiple of as many on."""


def num_tiles(T: int, S: int, size: int) -> int:
    """As many as any batch of T tokens and S runs can need, the padding's included."""
    return T // size + S + 1


def cut_into_tiles(batch: RaggedBatch, size: int) -> Int[Array, "tiles 5"]:
    """Tiles of `size` tokens, a multiple of `ALIGNED`, on the device.

    The first of a run begins before it, where the run does not begin at a multiple of `ALIGNED`.
    Run s has the tiles from starts[s] // size + s on, which may be one more than it needs, and
    padding is a run behind the last. They come last to first: late ones of a prompt see most keys.

    Returns:
        Of each tile its sequence (any, where it is padding); where it starts; the first of its
        run's tokens, and the one behind the last (no more than the first, where there are none);
        the position in the sequence of where it starts. Those of padding and of empty tiles end at
        0: they see no keys.
    """
    starts, lens = batch.query_starts, batch.kv_lens
    S, T = lens.shape[0], batch.positions.shape[0]
    tile = jnp.arange(num_tiles(T, S, size), dtype=jnp.int32)[::-1]
    aligned = starts // ALIGNED * ALIGNED
    first_tiles = aligned // size + jnp.arange(S + 1, dtype=jnp.int32)
    # A search that is a loop would have the host of a GPU wait for each of its turns.
    run = jnp.searchsorted(first_tiles, tile, side="right", method="compare_all") - 1
    start = aligned[run] + (tile - first_tiles[run]) * size
    end = jnp.append(starts[1:], T)[run]
    first, stop = jnp.maximum(start, starts[run]), jnp.minimum(start + size, end)
    length = jnp.append(lens, 0)[run]
    position = jnp.where(first < stop, length - (end - start), start - stop)
    columns = (jnp.minimum(run, S - 1), start, first, stop, position)
    return jnp.stack(columns, axis=1).astype(jnp.int32)
