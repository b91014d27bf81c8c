"""Which tokens min_p, top_k and top_p keep: those within a limit of the most likely one.

A token's gap is (greatest logit - its logit) / temperature: 0 for the most likely token,
and exp(-gap) is its probability relative to that one's. All three truncations keep the
tokens whose gap is at most some limit, so a row's kept set is one number. In vLLM's order
min_p, top_k, top_p, where each works on what the one before kept:

- min_p keeps exp(-gap) >= min_p,
- top_k keeps a token if fewer than k tokens have a smaller gap,
- top_p keeps a token if those of smaller gap hold less than top_p of the mass.

The most likely token is always kept, and so are all tokens tied with the last one kept.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from .blocks import finite, in_blocks
from .rows import SamplingRows

MAX_GAP = 80.0
"""Tokens e^-80 times as likely as the most likely one are never drawn: float32 cannot
resolve such a draw, and their weights stay clear of subnormal numbers."""


def gaps(
    logits: Float[Array, "R V"], best: Float[Array, " R"], temperature: Float[Array, " R"]
) -> Float[Array, "R V"]:
    """(best - finite(logits)) / temperature, up to +inf; temperature 0 counts as 1."""
    scale = 1 / jnp.where(temperature > 0, temperature, 1)
    return (best[:, None] - finite(logits)) * scale[:, None]


def weights(gap: Float[Array, "R n"], limit: Float[Array, " R"]) -> Float[Array, "R n"]:
    """exp(-gap) of the tokens kept, else 0."""
    return jnp.where(gap <= limit[:, None], jnp.exp(-gap), 0)


def mass_before(
    logits: Float[Array, "R V"],
    best: Float[Array, " R"],
    temperature: Float[Array, " R"],
    gap: Float[Array, " R"],
) -> Float[Array, " R"]:
    """Weight of the tokens whose gap is smaller than `gap`."""
    gap_of = gaps(logits, best, temperature)
    return row_sum(jnp.where(gap_of < gap[:, None], jnp.exp(-gap_of), 0))


def row_sum(values: Float[Array, "R V"]) -> Float[Array, " R"]:
    return in_blocks(values, 0).sum(-1).sum(-1)


def limit_by_min_p(rows: SamplingRows) -> Float[Array, " S"]:
    return jnp.where(rows.min_p > 0, jnp.minimum(-jnp.log(rows.min_p), MAX_GAP), MAX_GAP)


def limit_among(
    candidates: Float[Array, "S K"], rows: SamplingRows, V: int
) -> tuple[Float[Array, " S"], Bool[Array, " S"]]:
    """The limit of rows that keep few tokens.

    Args:
        candidates: the K smallest gaps of each row, ascending.

    Returns:
        The greatest gap kept, and whether it holds: whether top_k is within K and keeps no
        token outside the candidates that is tied with the last of them.
    """
    K = candidates.shape[1]
    kth = jnp.take_along_axis(candidates, jnp.clip(rows.top_k - 1, 0, K - 1)[:, None], 1)[:, 0]
    limit = jnp.minimum(limit_by_min_p(rows), kth)
    holds = (rows.top_k > 0) & (rows.top_k <= K) & ((limit < candidates[:, -1]) | (V <= K))
    weight = weights(candidates, limit)
    mass_before = jnp.pad(jnp.cumsum(weight, -1)[:, :-1], ((0, 0), (1, 0)))
    kept = mass_before < (rows.top_p * weight.sum(-1))[:, None]
    by_p = jnp.where(kept, candidates, 0).max(-1)
    return jnp.where(rows.top_p < 1, jnp.minimum(limit, by_p), limit), holds


def limit_by_search(
    logits: Float[Array, "R V"], best: Float[Array, " R"], rows: SamplingRows
) -> Float[Array, " R"]:
    """The greatest gap kept, at most MAX_GAP, of any row; costs some 30 passes over it."""
    gap = gaps(logits, best, rows.temperature)
    limit, zero = limit_by_min_p(rows), jnp.zeros_like(best)
    k = rows.top_k.astype(jnp.float32)
    limit = _bisect(gap, jnp.ones_like(gap), k, jnp.where(rows.top_k > 0, zero, limit), limit)
    weight = weights(gap, limit)
    target = rows.top_p * row_sum(weight)
    return _bisect(gap, weight, target, jnp.where(rows.top_p < 1, zero, limit), limit)


def _bisect(
    gap: Float[Array, "R V"],
    weight: Float[Array, "R V"],
    target: Float[Array, " R"],
    lower: Float[Array, " R"],
    upper: Float[Array, " R"],
) -> Float[Array, " R"]:
    """The greatest t in [lower, upper] below which lies less than `target` of the weight.

    Exact: it halves the range of float32 bit patterns, which order as the non-negative
    numbers they stand for. `lower` itself is taken to qualify.
    """

    def bits(x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    def halve(span: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = span
        middle = low + (high - low) // 2
        t = lax.bitcast_convert_type(middle, jnp.float32)
        ok = row_sum(jnp.where(gap < t[:, None], weight, 0)) < target
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    def wide(span: tuple[Array, Array]) -> Array:
        return jnp.any(span[1] - span[0] > 1)

    low, _ = lax.while_loop(wide, halve, (bits(lower), bits(upper) + 1))
    return lax.bitcast_convert_type(low, jnp.float32)
