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

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .blocks import in_blocks, lane_sums
from .rows import SamplingRows
from .shards import add_up

MAX_GAP = 80.0
"""Tokens e^-80 times as likely as the most likely one are never drawn: float32 cannot
resolve such a draw, and their weights stay clear of subnormal numbers."""


class Scale(NamedTuple):
    """What turns the logits of a row into gaps; temperature 0 counts as 1."""

    best: Float[Array, " R"]
    temperature: Float[Array, " R"]

    def gaps(self, values: Float[Array, "R n"]) -> Float[Array, "R n"]:
        """(best - values) / temperature, from 0 up to +inf; NaN where `best` is not finite."""
        factor = 1 / jnp.where(self.temperature > 0, self.temperature, 1)
        return (self.best[:, None] - values) * factor[:, None]


def weights(gap: Float[Array, "R n"], limit: Float[Array, " R"]) -> Float[Array, "R n"]:
    """exp(-gap) of the tokens kept, else 0."""
    return jnp.where(gap <= limit[:, None], jnp.exp(-gap), 0)


def total(sums: Float[Array, "R n"]) -> Float[Array, " R"]:
    """The sum of each row, by a cumulative sum: its order does not depend on R."""
    return jnp.cumsum(sums, -1)[:, -1]


def mass_before(
    logits: Float[Array, "R V"], scale: Scale, gap: Float[Array, " R"], axis: str | None = None
) -> Float[Array, " R"]:
    """Weight of the tokens whose gap is smaller than `gap`."""

    def term(values: Float[Array, "R n"]) -> Float[Array, "R n"]:
        gaps = scale.gaps(values)
        return jnp.where(gaps < gap[:, None], jnp.exp(-gaps), 0)

    return total(lane_sums(logits, term, axis))


def limit_by_min_p(rows: SamplingRows) -> Float[Array, " S"]:
    return jnp.minimum(jnp.abs(jnp.log(rows.min_p)), MAX_GAP)


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
    mass = jnp.cumsum(weights(candidates, limit), -1)
    before = jnp.pad(mass[:, :-1], ((0, 0), (1, 0)))
    by_p = jnp.where(before < rows.top_p[:, None] * mass[:, -1:], candidates, 0).max(-1)
    return jnp.where(rows.top_p < 1, jnp.minimum(limit, by_p), limit), holds


def limit_by_search(
    logits: Float[Array, "R V"], scale: Scale, rows: SamplingRows, axis: str | None = None
) -> Float[Array, " R"]:
    """The greatest gap kept, at most MAX_GAP, of any row; costs tens of passes over it."""
    gap = scale.gaps(logits)

    def truncate(by_p: Array, limit: Array) -> Array:
        weight = jnp.where(gap <= limit[:, None], jnp.where(by_p, jnp.exp(-gap), 1), 0)
        target = jnp.where(by_p, rows.top_p * row_sum(weight, axis), rows.top_k.astype(jnp.float32))
        lower = jnp.where(jnp.where(by_p, rows.top_p < 1, rows.top_k > 0), 0, limit)

        def least_weight(t: Array) -> Array:
            return jnp.where(by_p, jnp.exp(-t), 1)

        return _bisect(gap, weight, target, lower, limit, least_weight, axis)

    return lax.fori_loop(0, 2, lambda i, limit: truncate(i == 1, limit), limit_by_min_p(rows))


def row_sum(values: Float[Array, "R V"], axis: str | None = None) -> Float[Array, " R"]:
    return add_up(in_blocks(values, 0.0).sum(-1).sum(-1), axis)


class _Span(NamedTuple):
    """Bit patterns of two gaps, and the weight of the tokens of smaller gap than each."""

    low: Int[Array, " R"]
    high: Int[Array, " R"]
    low_mass: Float[Array, " R"]
    high_mass: Float[Array, " R"]


def _bisect(
    gap: Float[Array, "R V"],
    weight: Float[Array, "R V"],
    target: Float[Array, " R"],
    lower: Float[Array, " R"],
    upper: Float[Array, " R"],
    least_weight: Callable[[Float[Array, " R"]], Float[Array, " R"]],
    axis: str | None,
) -> Float[Array, " R"]:
    """A limit from `lower` to `upper` that keeps the tokens with less than `target` before them.

    It halves the range of float32 bit patterns, which order as the non-negative numbers
    they stand for, until the ends are neighbours or no two tokens can be left between
    them: a token of gap up to t weighs at least `least_weight(t)`.
    """

    def value(bits: Array) -> Array:
        return lax.bitcast_convert_type(bits, jnp.float32)

    def halve(s: _Span) -> _Span:
        middle = s.low + (s.high - s.low) // 2
        mass = row_sum(jnp.where(gap < value(middle)[:, None], weight, 0), axis)
        ok = (mass < target) | (middle == s.low)
        return _Span(
            jnp.where(ok, middle, s.low),
            jnp.where(ok, s.high, middle),
            jnp.where(ok, mass, s.low_mass),
            jnp.where(ok, s.high_mass, mass),
        )

    def undecided(s: _Span) -> Array:
        two_tokens = s.high_mass - s.low_mass > 1.5 * least_weight(value(s.high))
        return jnp.any((s.high - s.low > 1) & two_tokens)

    bits = [lax.bitcast_convert_type(x, jnp.int32) for x in (lower, upper)]
    start = _Span(bits[0], bits[1] + 1, jnp.zeros_like(lower), row_sum(weight, axis))
    return value(lax.while_loop(undecided, halve, start).high - 1)
