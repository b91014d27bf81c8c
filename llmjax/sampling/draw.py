"""Drawing one token from a row of weights by inverting its cumulative sum, in two levels.

The first level draws a lane of the vocabulary (every n-th token), the second a token of
it, each with a uniform number of its own, so that a draw reads the vocabulary once and
needs no random number per token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from .blocks import BLOCK, lane_sums
from .shards import at_ids
from .truncation import Scale, total, weights


def uniforms(seed: UInt32[Array, "S 2"], position: Int[Array, " S"]) -> Float[Array, "S 4"]:
    """Numbers in [0, 1), a function of the row's seed and position alone."""

    def words(seed: Array, counter: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, counter))

    # A folded key is two random words already; drawing from it would hash them once more.
    counters = 2 * position[:, None] + jnp.arange(2)
    hashed = jax.vmap(jax.vmap(words, (None, 0)))(seed, counters).reshape(-1, 4)
    return (hashed >> 8).astype(jnp.float32) * 2**-24


def pick(weight: Float[Array, "R n"], u: Float[Array, " R"]) -> Int[Array, " R"]:
    """An index with probability weight / sum(weight), never one whose weight is 0.

    Index 0 where all are.
    """
    n = weight.shape[1]
    index = jnp.arange(n)
    below = jnp.cumsum(weight, -1)
    positive = weight > 0
    hit = positive & (below > (u * below[:, -1])[:, None])
    # Rounding may leave no hit: then the last index of positive weight is the one.
    return jnp.minimum(jnp.where(hit, index, n).min(-1), jnp.where(positive, index, 0).max(-1))


class Draw(NamedTuple):
    """A token of each row, int32, its gap, and the weight of all that could be drawn."""

    token_ids: Int[Array, " R"]
    gap: Float[Array, " R"]
    mass: Float[Array, " R"]


def draw(
    logits: Float[Array, "R V"],
    scale: Scale,
    limit: Float[Array, " R"],
    u: Float[Array, "R 2"],
    axis: str | None = None,
) -> Draw:
    """Draw among the tokens whose gap is at most `limit`."""
    mass = lane_sums(logits, lambda values: weights(scale.gaps(values), limit), axis)
    lane = pick(mass, u[:, 0])
    ids = lane[:, None] + mass.shape[1] * jnp.arange(BLOCK)
    gap = scale.gaps(at_ids(logits, ids, axis))
    at = pick(weights(gap, limit), u[:, 1])
    return Draw(lane + mass.shape[1] * at, gap[jnp.arange(len(at)), at], total(mass))
