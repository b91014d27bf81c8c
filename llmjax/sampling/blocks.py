"""Maximum, argmax, top-k and sums over a large vocabulary by way of small blocks.

XLA's argmax and top_k walk the vocabulary one element at a time on a CPU; reducing blocks
of a row is vectorised, and the few blocks that matter are then cheap to look into.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .shards import add_up, first_id, vocab_size

BLOCK = 64


def in_blocks(values: Float[Array, "R V"], fill: float) -> Float[Array, "R B b"]:
    """Cut each row into blocks of BLOCK, the last one padded with `fill`."""
    R, V = values.shape
    return jnp.pad(values, ((0, 0), (0, -V % BLOCK)), constant_values=fill).reshape(R, -1, BLOCK)


def block_maxima(logits: Float[Array, "R V"]) -> Float[Array, "R B"]:
    return in_blocks(logits, -jnp.inf).max(-1)


def argmax(
    logits: Float[Array, "R V"], maxima: Float[Array, "R B"], axis: str | None = None
) -> Int[Array, " R"]:
    """The first id of the greatest logit (of NaN where there is one), int32."""
    block = jnp.argmax(maxima, -1)
    inside = block_values(logits, block[:, None])[:, 0]
    ids = (block * BLOCK + jnp.argmax(inside, -1)).astype(jnp.int32)
    if axis is None:
        return ids
    # The devices are in the order of their tokens: the first of equals is the first here too.
    bits = lax.bitcast_convert_type(maxima.max(-1), jnp.int32)
    found = lax.all_gather(jnp.stack([bits, ids + first_id(logits, axis)]), axis)
    best = jnp.argmax(lax.bitcast_convert_type(found[:, 0], jnp.float32), 0)
    return jnp.take_along_axis(found[:, 1], best[None], 0)[0]


def top_k(
    logits: Float[Array, "R V"], maxima: Float[Array, "R B"], k: int, axis: str | None = None
) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """lax.top_k: greatest first, the lower id first among equals.

    Where k exceeds the vocabulary, the rest is -inf with ids that are not below it.
    """
    if axis is None:
        return _top_k(logits, maxima, k)
    # Of a device's tokens no more can be among the k; those of lower id come first here too.
    values, ids = _top_k(logits, maxima, min(k, logits.shape[1]))
    ids += first_id(logits, axis)
    values, ids = (lax.all_gather(x, axis, axis=1, tiled=True) for x in (values, ids))
    missing = ((0, 0), (0, max(0, k - ids.shape[1])))
    values = jnp.pad(values, missing, constant_values=-jnp.inf)
    ids = jnp.pad(ids, missing, constant_values=vocab_size(logits, axis))
    values, places = lax.top_k(values, k)
    return values, jnp.take_along_axis(ids, places, 1)


def _top_k(
    logits: Float[Array, "R V"], maxima: Float[Array, "R B"], k: int
) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    R, B = maxima.shape
    if 4 * k >= B:  # most blocks matter
        missing = max(0, k - logits.shape[1])
        padded = jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)
        values, ids = lax.top_k(padded, k)
        return values, ids
    # The k greatest are in the k blocks of greatest maximum; in order of id, so that
    # top_k settles ties as it would over the whole row.
    blocks = jnp.sort(lax.top_k(maxima, k)[1], -1)
    values, index = lax.top_k(block_values(logits, blocks).reshape(R, -1), k)
    ids = jnp.take_along_axis(blocks, index // BLOCK, 1) * BLOCK + index % BLOCK
    return values, ids


def block_values(logits: Float[Array, "R V"], blocks: Int[Array, "R k"]) -> Float[Array, "R k b"]:
    """The logits of whole blocks; -inf past the end of the row."""
    ids = blocks[:, :, None] * BLOCK + jnp.arange(BLOCK)
    rows = jnp.arange(logits.shape[0])[:, None, None]
    return logits.at[rows, ids].get(mode="fill", fill_value=-jnp.inf)


def lane_sums(
    logits: Float[Array, "R V"],
    term: Callable[[Float[Array, "R n"]], Float[Array, "R n"]],
    axis: str | None = None,
) -> Float[Array, "R n"]:
    """Sums of term(logits) over n lanes; lane j holds tokens j, j + n, j + 2n, ...

    BLOCK tokens to a lane, added one after the other, so that the sums of a row are the
    same to the bit whatever R is: how XLA orders a reduction depends on the whole shape.
    `term` is 0 at -inf, which fills the last tokens up. Devices that share a vocabulary each
    add up what they have of every lane, and then one another's.
    """
    n = -(-vocab_size(logits, axis) // BLOCK)
    lanes = _in_lanes(logits, n, first_id(logits, axis) % n)

    def add(i: Array, sums: Array) -> Array:
        return sums + term(lax.dynamic_index_in_dim(lanes, i, 1, keepdims=False))

    sums = lax.fori_loop(0, lanes.shape[1], add, jnp.zeros((len(logits), n), jnp.float32))
    return add_up(sums, axis)


def _in_lanes(
    logits: Float[Array, "R V"], n: int, lane: Int[Array, ""] | int
) -> Float[Array, "R i n"]:
    """The tokens in rows of n, the first of them in `lane`."""
    R, V = logits.shape
    if V % n == 0 or isinstance(lane, int):  # then the first of them is in lane 0
        padded = jnp.pad(logits, ((0, 0), (0, -V % n)), constant_values=-jnp.inf)
    else:
        room = jnp.full((R, (-(-V // n) + 1) * n), -jnp.inf, logits.dtype)
        padded = lax.dynamic_update_slice_in_dim(room, logits, lane, 1)
    return padded.reshape(R, -1, n)
