"""What the sampler is told about each row, and how it visits rows that need special work."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32


class SamplingRows(NamedTuple):
    """Parameters of each row of logits, in the order of the rows.

    A row of padding has temperature 0, neutral penalties, `num_bias` 0, `num_logprobs` -1
    and no mask; then it costs nothing, but a copy of its logits where any row has a mask.

    Attributes:
        temperature: float32; 0 is greedy.
        top_k: int32; 0 keeps all tokens.
        top_p: float32; 1 keeps all tokens.
        min_p: float32; 0 keeps all tokens.
        repetition_penalty: float32; 1 is neutral.
        presence_penalty, frequency_penalty: float32; 0 is neutral.
        seed: uint32, the high and the low half of a 64-bit seed.
        position: int32, in its sequence, of the token to choose. Randomness is a function
            of seed and position alone.
        prompt_len: int32, tokens of the prompt.
        kv_len: int32, tokens known: positions 0 to kv_len - 1 of the history are valid.
        slot: int32, the row's place in the history and in the bias table.
        num_bias: int32, valid entries of the row in the bias table.
        num_logprobs: int32, most likely tokens to report beside the chosen one; -1
            reports nothing.
        masked: bool; the row's token is one of those that its mask allows.
    """

    temperature: Float[Array, " S"]
    top_k: Int[Array, " S"]
    top_p: Float[Array, " S"]
    min_p: Float[Array, " S"]
    repetition_penalty: Float[Array, " S"]
    presence_penalty: Float[Array, " S"]
    frequency_penalty: Float[Array, " S"]
    seed: UInt32[Array, "S 2"]
    position: Int[Array, " S"]
    prompt_len: Int[Array, " S"]
    kv_len: Int[Array, " S"]
    slot: Int[Array, " S"]
    num_bias: Int[Array, " S"]
    num_logprobs: Int[Array, " S"]
    masked: Bool[Array, " S"]

    @property
    def random(self) -> Bool[Array, " S"]:
        return self.temperature > 0

    @property
    def penalised(self) -> Bool[Array, " S"]:
        additive = (self.presence_penalty != 0) | (self.frequency_penalty != 0)
        return additive | (self.repetition_penalty != 1)

    def take(self, ids: Int[Array, " R"]) -> SamplingRows:
        return SamplingRows(*(field[ids] for field in self))


def map_rows(
    flags: Bool[Array, " S"], compute: Callable[[Int[Array, " R"]], Array], values: Array
) -> Array:
    """`values` [S, ...] with the flagged rows replaced by `compute(row numbers)` [R, ...].

    A CPU visits the flagged rows one by one: a row of V floats stays in its cache, and
    rows that are not flagged cost nothing. Other devices compute all rows at once.
    """

    def replace(values: Array) -> Array:
        return lax.platform_dependent(
            values,
            cpu=lambda values: one_by_one(flags, compute, values),
            default=lambda values: at_once(flags, compute, values),
        )

    # XLA computes what does not change in a loop before it, even for a loop of no turns.
    return lax.cond(flags.any(), replace, lambda values: values, values)


def one_by_one(flags: Array, compute: Callable[[Array], Array], values: Array) -> Array:
    order = jnp.argsort(~flags)

    def body(i: Array, values: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(order, i, 1)
        return lax.dynamic_update_slice_in_dim(values, compute(rows), rows[0], 0)

    return lax.fori_loop(0, flags.sum(), body, values)


def at_once(flags: Array, compute: Callable[[Array], Array], values: Array) -> Array:
    chosen = flags.reshape((-1,) + (1,) * (values.ndim - 1))
    return jnp.where(chosen, compute(jnp.arange(flags.size)), values)
