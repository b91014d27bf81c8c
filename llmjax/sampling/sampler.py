"""From logits to tokens: one traced function for rows that may each ask for something else.

What is optional costs nothing until a row asks for it, and a row's token depends neither
on the other rows nor on how many there are.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from . import blocks
from .adjust import BiasTable, adjust
from .draw import draw, pick, uniforms
from .logprobs import Logprobs, token_logprobs
from .rows import SamplingRows, map_rows
from .shards import greatest, vocab_size
from .truncation import (
    Scale,
    limit_among,
    limit_by_min_p,
    limit_by_search,
    mass_before,
    weights,
)

NUM_CANDIDATES = 72
"""Rows with a smaller top_k (64 is the largest that models commonly ask for) draw from
that many most likely tokens."""


class SampledTokens(NamedTuple):
    """The tokens chosen, with `Logprobs` that are meaningless in rows that ask for none.

    Attributes:
        token_ids: int32, always below V.
    """

    token_ids: Int[Array, " S"]
    logprob: Float[Array, " S"]
    rank: Int[Array, " S"]
    top_ids: Int[Array, "S K"]
    top_logprobs: Float[Array, "S K"]


def sample(
    logits: Float[Array, "S V"],
    rows: SamplingRows,
    history: Int[Array, "slots max_len"],
    bias: BiasTable,
    masks: Int[Array, "S W"],
    *,
    max_logprobs: int,
    axis: str | None = None,
) -> SampledTokens:
    """Choose the next token of each row. To be called inside a jitted step.

    The order is vLLM's: log-probabilities are of the logits as they come; then repetition
    penalty (over prompt and output), frequency and presence penalty (over the output),
    biases, masks; then greedy rows take the greatest (the lowest id among equals), others divide
    by temperature, truncate by min_p, top_k and top_p (see `truncation`) and draw.

    A token of logit -inf is never chosen but in a row of nothing else, which gives id 0.
    A row with NaN or +inf is broken and gives some id below V.

    Args:
        logits: float32.
        history: int32 token ids by slot and position.
        masks: int32; bit i % 32 of word i // 32 allows token i, in the rows that are `masked`.
        max_logprobs: most likely tokens to return where any row asks for some (static).
        axis: see `shards`; tokens are those that one device would choose, but for the rounding
            of sums.
    """
    plain = ~jnp.any(rows.random | rows.penalised | rows.masked | (rows.num_bias > 0))
    token_ids = lax.cond(
        plain,
        lambda: blocks.argmax(logits, blocks.block_maxima(logits), axis),
        lambda: _choose(adjust(logits, rows, history, bias, masks, axis), rows, axis),
    )
    empty = jnp.zeros(token_ids.shape, jnp.float32)
    top = jnp.zeros((*token_ids.shape, max_logprobs), jnp.float32)
    scores = lax.cond(
        jnp.any(rows.num_logprobs >= 0),
        lambda: token_logprobs(
            logits,
            token_ids,
            max_logprobs=max_logprobs,
            want_top=jnp.any(rows.num_logprobs > 0),
            axis=axis,
        ),
        lambda: Logprobs(empty, empty.astype(jnp.int32), top.astype(jnp.int32), top),
    )
    return SampledTokens(token_ids, *scores)


def _choose(logits: Float[Array, "S V"], rows: SamplingRows, axis: str | None) -> Int[Array, " S"]:
    maxima = blocks.block_maxima(logits)
    greedy = blocks.argmax(logits, maxima, axis)
    drawn = lax.cond(
        jnp.any(rows.random), lambda: _draw(logits, maxima, rows, axis), lambda: greedy
    )
    return jnp.where(rows.random, drawn, greedy)


def _draw(
    logits: Float[Array, "S V"], maxima: Float[Array, "S B"], rows: SamplingRows, axis: str | None
) -> Int[Array, " S"]:
    """Draw from the candidates alone where top_k leaves only such, else from all tokens."""
    V = vocab_size(logits, axis)
    scale = Scale(greatest(maxima.max(-1), axis), rows.temperature)
    u = uniforms(rows.seed, rows.position)

    def from_candidates() -> tuple[Array, Array]:
        values, ids = blocks.top_k(logits, maxima, min(NUM_CANDIDATES, V), axis)
        candidates = scale.gaps(values)
        limit, settled = limit_among(candidates, rows, V)
        index = pick(weights(candidates, limit), u[:, 0])
        return jnp.take_along_axis(ids, index[:, None], 1)[:, 0].astype(jnp.int32), settled

    def undecided() -> tuple[Array, Array]:
        zeros = jnp.zeros(rows.slot.shape, jnp.int32)
        return zeros, zeros > 0

    few = rows.random & (rows.top_k > 0) & (rows.top_k < NUM_CANDIDATES)
    drawn, settled = lax.cond(jnp.any(few), from_candidates, undecided)
    return lax.cond(
        jnp.any(rows.random & ~settled),
        lambda: jnp.where(settled, drawn, _draw_from_all(logits, scale, rows, u, settled, axis)),
        lambda: drawn,
    )


def _draw_from_all(
    logits: Float[Array, "S V"],
    scale: Scale,
    rows: SamplingRows,
    u: Float[Array, "S 4"],
    settled: Bool[Array, " S"],
    axis: str | None,
) -> Int[Array, " S"]:
    """Draw from all that min_p keeps; where top_p turns out to exclude the token, draw again.

    Most first draws stand, as what top_p keeps is most of the mass, and checking one token
    is cheaper than finding the limit. The second draw, from the exact kept set and with
    numbers of its own, makes the result exact.
    """
    open_rows = rows.random & ~settled
    by_k = open_rows & (rows.top_k > 0) & (rows.top_k < vocab_size(logits, axis))
    by_p = open_rows & ~by_k & (rows.top_p < 1)
    first = draw(logits, scale, limit_by_min_p(rows), u[:, :2], axis)
    before = lax.cond(
        jnp.any(by_p),
        lambda: mass_before(logits, scale, first.gap, axis),
        lambda: jnp.zeros_like(first.mass),
    )

    def draw_again(ids: Int[Array, " R"]) -> Int[Array, " R"]:
        of = Scale(scale.best[ids], scale.temperature[ids])
        limit = limit_by_search(logits[ids], of, rows.take(ids), axis)
        return draw(logits[ids], of, limit, u[ids, 2:], axis).token_ids

    excluded = by_k | (by_p & (before >= rows.top_p * first.mass))
    return map_rows(excluded, draw_again, first.token_ids)
