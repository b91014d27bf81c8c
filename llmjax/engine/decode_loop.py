"""Several decode steps in one program: the host's turns between them are saved.

Each turn of the loop is a step and its sampler, as the programs of one step have them. A row that
has ended computes its last position once more, which writes what stands there already, so that
kernels need know nothing of it; what it samples is not kept.

A step may be dispatched before the host has seen that a row of the one before has ended. What
such a row leaves in the history, where the next step looks for its token, is the token that ended
it; so a row that begins with such a token ends at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from llmjax_kernels.kv_format import KVFormat

from ..cache.layout import KVLayout
from ..checkpoint import LoadedModel
from ..sampling import SampledTokens, mask_words
from .batch import go_on, rows_size, unpack, unpack_rows
from .buckets import Bucket
from .ends import ROW_SIZE, unpack_ends
from .step import (
    DeviceState,
    Program,
    Sampler,
    Step,
    StepPrograms,
    make_sampler,
    shapes_of,
    shardings_of,
    whole_of,
)

NO_TOKEN = -1
"""Where a row has ended."""
Loop = Callable[..., tuple[DeviceState, SampledTokens]]


class LoopPrograms(StepPrograms):
    """Compiles steps, and for buckets of decodes besides `num_steps` of them as one program.

    The one is for rows that need the host between their tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        layout: KVLayout,
        kv_format: KVFormat,
        *,
        num_steps: int,
        **options: int,
    ):
        super().__init__(model, layout, kv_format, **options)
        self._num_steps = num_steps

    def compile(
        self, bucket: Bucket, num_pages: int, x: jax.ShapeDtypeStruct | None = None
    ) -> Program:
        """The program of a bucket."""
        program = super().compile(bucket, num_pages, x)
        if not bucket.decode_only:
            return program
        S, mesh, state = bucket.seqs, self.model.mesh, self.state_shapes(num_pages)
        loop = make_loop(
            self._make_step(bucket),
            make_sampler(S, self._max_logprobs, mesh),
            bucket,
            self.layout.num_groups,
            self._num_steps,
            self._max_logprobs,
        )
        rows, ends = (
            jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole_of(mesh))
            for shape in ((rows_size(S),), (S, ROW_SIZE))
        )
        out = (shardings_of(state), state.history.sharding)
        compiled = (
            jax.jit(loop, donate_argnums=1, out_shardings=out)
            .lower(shapes_of(self.weights), state, self._packed(bucket), rows, ends)
            .compile()
        )
        return program._replace(loop=compiled)


class _Turn(NamedTuple):
    """What goes from one turn to the next.

    Attributes:
        tokens: that each row computes, `moved` positions behind those of the first turn.
        on: rows that compute them for the first time.
        last: each row's newest token.
        sampled: of all turns.
    """

    number: Int[Array, ""]
    tokens: Int[Array, " S"]
    moved: Int[Array, " S"]
    on: Bool[Array, " S"]
    last: Int[Array, " S"]
    state: DeviceState
    sampled: SampledTokens


@lru_cache(maxsize=256)
def make_loop(
    step: Step,
    sampler: Sampler,
    bucket: Bucket,
    num_groups: int,
    num_steps: int,
    max_logprobs: int,
) -> Loop:
    """`loop(weights, state, packed, rows, ends) -> (state, SampledTokens)`, to be jitted with the
    state donated.

    What was sampled has an axis of `num_steps` in front; where a row has ended, its token is
    `NO_TOKEN`. The same loop for the same arguments, as `make_step`'s.

    Args:
        step, sampler: of a bucket of decodes, whose first turn is in `packed` and `rows`.
    """
    S = bucket.seqs

    def loop(weights, state, packed, rows, ends):
        ends, inputs = unpack_ends(ends), unpack(packed, bucket, num_groups)
        first = unpack_rows(rows, S)[0].position

        def turn(now: _Turn) -> _Turn:
            each = go_on(packed, rows, bucket, num_groups, now.tokens, now.moved, now.on)
            state, output = step(weights, now.state, each[0])
            masks = jnp.zeros((S, mask_words(output.logits.shape[1])), jnp.int32)
            history, given = sampler(state.history, state.bias, output.logits, each[1], masks)
            last = jnp.where(now.on, given.token_ids, now.last)
            given = given._replace(token_ids=jnp.where(now.on, last, NO_TOKEN))
            number, ended = now.number + 1, ends.reached(last, first + now.moved)
            on = now.on & (number < ends.steps) & ~ended
            return _Turn(
                number,
                jnp.where(on, last, now.tokens),
                now.moved + on,
                on,
                last,
                replace(state, history=history),
                jax.tree.map(lambda all, new: all.at[now.number].set(new), now.sampled, given),
            )

        known = state.history[inputs.slots, first - 1]
        tokens = jnp.where(inputs.tokens >= 0, inputs.tokens, known)
        on = (ends.steps > 0) & ~ends.reached(tokens, first - 1)
        zeros, none = jnp.zeros(S, jnp.int32), _nothing(num_steps, S, max_logprobs)
        start = _Turn(jnp.int32(0), tokens, zeros, on, tokens, state, none)
        end = lax.while_loop(lambda now: now.on.any(), turn, start)
        at = inputs.slots, first - 1 + ends.steps
        history = end.state.history.at[at].set(end.last, mode="drop")
        return replace(end.state, history=history), end.sampled

    return loop


def _nothing(num_steps: int, S: int, max_logprobs: int) -> SampledTokens:
    numbers, top = jnp.zeros((num_steps, S)), jnp.zeros((num_steps, S, max_logprobs))
    ints, top_ints = numbers.astype(jnp.int32), top.astype(jnp.int32)
    return SampledTokens(ints + NO_TOKEN, numbers, ints, top_ints, top)
