"""Penalties, biases and masks: what changes the logits before a token is chosen."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .rows import SamplingRows, map_rows
from .shards import first_id

CHUNK = 512
"""History positions that one turn of a loop counts."""

BIAS_CHUNK = 32
"""Bias entries that one turn of a loop adds."""


class BiasTable(NamedTuple):
    """Values added to logits, by slot; `SamplingRows.num_bias` says how many are valid.

    Attributes:
        ids: int32 token ids. Ids outside the vocabulary are ignored.
        values: float32; -inf bans the token.
        until: int32; an entry holds while fewer output tokens than this are known.
    """

    ids: Int[Array, "slots B"]
    values: Float[Array, "slots B"]
    until: Int[Array, "slots B"]


def mask_words(V: int) -> int:
    """32-bit words of a mask over V tokens."""
    return -(-V // 32)


def adjust(
    logits: Float[Array, "S V"],
    rows: SamplingRows,
    history: Int[Array, "slots max_len"],
    bias: BiasTable,
    masks: Int[Array, "S W"],
    axis: str | None = None,
) -> Float[Array, "S V"]:
    """Penalise what was said, add the biases, then leave only what the masks allow."""

    first = first_id(logits, axis)

    def penalised(ids: Int[Array, " R"]) -> Float[Array, "R V"]:
        some = rows.take(ids)
        some = some._replace(kv_len=jnp.where(some.penalised, some.kv_len, 0))
        return _penalise(logits[ids], some, history, first)

    logits = _add_bias(map_rows(rows.penalised, penalised, logits), rows, bias, first)

    def allowed(logits: Float[Array, "S V"]) -> Float[Array, "S V"]:
        bits = ((masks[:, :, None] >> jnp.arange(32)) & 1).reshape(len(masks), -1)
        here = lax.dynamic_slice_in_dim(bits, first, logits.shape[1], 1)
        return jnp.where(rows.masked[:, None] & (here == 0), -jnp.inf, logits)

    # All rows at once takes as long as to copy them; row by row, as much for one in seven.
    return lax.cond(rows.masked.any(), allowed, lambda logits: logits, logits)


def _penalise(
    logits: Float[Array, "R V"],
    rows: SamplingRows,
    history: Int[Array, "slots max_len"],
    first: Int[Array, ""] | int,
) -> Float[Array, "R V"]:
    """HF's repetition penalty over prompt and output, then OpenAI's over the output."""
    prompt, output = _count_tokens(rows, history, first, logits.shape[1])
    factor = rows.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where((prompt > 0) | (output > 0), repeated, logits)
    logits = logits - rows.frequency_penalty[:, None] * output
    return logits - rows.presence_penalty[:, None] * (output > 0)


def _count_tokens(
    rows: SamplingRows, history: Int[Array, "slots max_len"], first: Int[Array, ""] | int, V: int
) -> tuple[Float[Array, "R V"], Float[Array, "R V"]]:
    """How often each of V tokens, from `first` on, stands in the prompt and in the output."""
    R = rows.slot.size

    def count_chunk(i: Array, counts: Array) -> Array:
        at = i * CHUNK + jnp.arange(CHUNK)
        ids = history.at[rows.slot[:, None], at].get(mode="fill", fill_value=-1) - first
        known = (at < rows.kv_len[:, None]) & (ids >= 0) & (ids < V)
        part = (at >= rows.prompt_len[:, None]).astype(jnp.int32)
        ids = jnp.where(known, part * V + ids, 2 * V)
        return counts.at[jnp.arange(R)[:, None], ids].add(1, mode="drop")

    num_chunks = (jnp.max(rows.kv_len) + CHUNK - 1) // CHUNK
    counts = lax.fori_loop(0, num_chunks, count_chunk, jnp.zeros((R, 2 * V), jnp.float32))
    return counts[:, :V], counts[:, V:]


def _add_bias(
    logits: Float[Array, "S V"], rows: SamplingRows, bias: BiasTable, first: Int[Array, ""] | int
) -> Float[Array, "S V"]:
    S, V = logits.shape
    num_output = rows.kv_len - rows.prompt_len

    def add_chunk(i: Array, logits: Array) -> Array:
        at = i * BIAS_CHUNK + jnp.arange(BIAS_CHUNK)
        where = (rows.slot[:, None], at)
        ids = bias.ids.at[where].get(mode="fill", fill_value=-1) - first
        holds = num_output[:, None] < bias.until.at[where].get(mode="fill", fill_value=0)
        holds &= (at < rows.num_bias[:, None]) & (ids >= 0) & (ids < V)
        values = bias.values.at[where].get(mode="fill", fill_value=0)
        ids = jnp.where(holds, ids, V)
        return logits.at[jnp.arange(S)[:, None], ids].add(values, mode="drop")

    num_chunks = (jnp.max(rows.num_bias) + BIAS_CHUNK - 1) // BIAS_CHUNK
    return lax.fori_loop(0, num_chunks, add_chunk, logits)
