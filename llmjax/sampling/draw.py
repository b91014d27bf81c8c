"""Drawing one token from a row of weights by inverting its cumulative sum, in two levels.

The first level draws a block of the vocabulary, the second a token inside it, each with a
uniform number of its own, so that a draw reads the vocabulary once and needs no random
number per token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from .blocks import BLOCK, block_values, in_blocks
from .truncation import gaps, weights


def uniforms(
    seed: UInt32[Array, "S 2"], position: Int[Array, " S"], num: int
) -> Float[Array, "S num"]:
    """Numbers in [0, 1), a function of the row's seed and position alone."""

    def one(seed: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), (num,))

    return jax.vmap(one)(seed, position)


def pick(weight: Float[Array, "R n"], u: Float[Array, " R"]) -> Int[Array, " R"]:
    """An index with probability weight / sum(weight), never one whose weight is 0."""
    n = weight.shape[1]
    index = jnp.arange(n)
    total = jnp.cumsum(weight, -1)
    positive = weight > 0
    hit = positive & (total > (u * total[:, -1])[:, None])
    # Rounding may leave no hit: then the last index of positive weight is the one.
    return jnp.minimum(jnp.where(hit, index, n).min(-1), jnp.where(positive, index, 0).max(-1))


class Draw(NamedTuple):
    """A token of each row, int32, its gap, and the weight of all that could be drawn."""

    token_ids: Int[Array, " R"]
    gap: Float[Array, " R"]
    mass: Float[Array, " R"]


def draw(
    logits: Float[Array, "R V"],
    best: Float[Array, " R"],
    temperature: Float[Array, " R"],
    limit: Float[Array, " R"],
    u: Float[Array, "R 2"],
) -> Draw:
    """Draw among the tokens whose gap is at most `limit`."""
    mass = in_blocks(weights(gaps(logits, best, temperature), limit), 0).sum(-1)
    block = pick(mass, u[:, 0])
    gap = gaps(block_values(logits, block[:, None])[:, 0], best, temperature)
    index = pick(weights(gap, limit), u[:, 1])
    token_ids = (block * BLOCK + index).astype(jnp.int32)
    return Draw(token_ids, jnp.take_along_axis(gap, index[:, None], 1)[:, 0], mass.sum(-1))
