"""Log-probabilities of given tokens and of the most likely ones."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .blocks import block_maxima, lane_sums, top_k
from .shards import add_up, at_ids, greatest, vocab_size
from .truncation import total

LOWEST = float(np.finfo(np.float32).min)


class Logprobs(NamedTuple):
    """Of the model's own distribution: before penalties, temperature and truncation.

    Attributes:
        logprob: float32, of the given token.
        rank: int32, 1 + the number of tokens that are more likely.
        top_ids, top_logprobs: the most likely tokens, best first, the lower id first among
            equals; past V tokens, id 0 with -inf.
    """

    logprob: Float[Array, " R"]
    rank: Int[Array, " R"]
    top_ids: Int[Array, "R K"]
    top_logprobs: Float[Array, "R K"]


def token_logprobs(
    logits: Float[Array, "R V"],
    token_ids: Int[Array, " R"],
    *,
    max_logprobs: int,
    want_top: Bool[Array, ""] | bool = True,
    axis: str | None = None,
) -> Logprobs:
    """Log-probabilities of `token_ids`, one a row, and of the `max_logprobs` most likely.

    For a prompt pass the logits of its positions with the token that follows each.
    Those of ids below V are finite: at least the least float32, which also stands in for
    what is not a number. Where `want_top` is False the most likely tokens are not looked
    for and their arrays are zero.
    """
    R, V = len(logits), vocab_size(logits, axis)
    maxima = block_maxima(logits)
    best = greatest(maxima.max(-1, keepdims=True), axis)
    mass = total(lane_sums(logits, lambda values: jnp.exp(values - best), axis))
    log_mass = jnp.log(mass)[:, None]

    def normalise(chosen: Float[Array, "R n"]) -> Float[Array, "R n"]:
        return jnp.nan_to_num(chosen - best - log_mass, nan=LOWEST, neginf=LOWEST)

    def most_likely() -> tuple[Array, Array]:
        values, ids = top_k(logits, maxima, max_logprobs, axis)
        real = jnp.arange(max_logprobs) < V
        return jnp.where(real, ids, 0), jnp.where(real, normalise(values), -jnp.inf)

    def nothing() -> tuple[Array, Array]:
        shape = (R, max_logprobs)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    chosen = at_ids(logits, token_ids[:, None], axis)
    rank = 1 + add_up((logits > chosen).sum(-1, dtype=jnp.int32), axis)
    top_ids, top = lax.cond(want_top, most_likely, nothing) if max_logprobs else nothing()
    return Logprobs(normalise(chosen)[:, 0], rank, top_ids, top)
