"""Log-probabilities of prompt tokens, from the hidden states of the steps that compute them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from ..checkpoint import LoadedModel
from ..request import TokenLogprobs
from ..sampling import Logprobs, SampledTokens, token_logprobs
from .orders import ScoreOrder
from .plan import Plan
from .step import StepOutput, WeightsTree, over_vocabulary, shapes_of

_ROWS = 64
"""Prompt positions that are scored together, by one program."""


class PromptScorer:
    """Scores what requests ask for with `prompt_logprobs`.

    Args:
        head: the model, or the stage of it, that gives logits.
        weights, tree: of it.
        max_logprobs: most likely tokens that may be asked for.
        send: told of each order before it is carried out.
    """

    def __init__(
        self,
        head: LoadedModel,
        weights: list[Array],
        tree: WeightsTree,
        max_logprobs: int,
        send: Callable[[ScoreOrder], None],
    ):
        self._weights, self._send = weights, send
        self._program = _compile(head, weights, tree, max_logprobs)

    def score_plan(self, plan: Plan, output: StepOutput) -> list[list[TokenLogprobs]]:
        """For each chunk of a step those of the prompt tokens that follow its tokens, if asked."""
        out: list[list[TokenLogprobs]] = []
        at = 0
        for chunk in plan.chunks:
            rows: list[TokenLogprobs] = []
            # All choices have the same prompt: the first one tells.
            top = chunk.seq.request.params.prompt_logprobs if chunk.seq.index == 0 else None
            # Position p predicts the prompt token at p + 1; a recomputed one is known already.
            first = max(chunk.start, chunk.seq.num_prompt_logprobs)
            end = min(chunk.start + chunk.count, chunk.seq.prompt_len - 1)
            if top is not None and first < end:
                targets = chunk.seq.tokens[first + 1 : end + 1]
                rows = self._score_all(output, at + first - chunk.start, targets, top)
            out.append(rows)
            at += chunk.count
        return out

    def _score_all(
        self, output: StepOutput, begin: int, targets: list[int], top: int
    ) -> list[TokenLogprobs]:
        rows: list[TokenLogprobs] = []
        for at in range(0, len(targets), _ROWS):
            order = ScoreOrder(begin + at, targets[at : at + _ROWS])
            self._send(order)
            scored = jax.device_get(self.score(output, order))
            rows += [row_logprobs(scored, i, token, top) for i, token in enumerate(order.targets)]
        return rows

    def score(self, output: StepOutput, order: ScoreOrder) -> Logprobs:
        """Of up to `_ROWS` prompt tokens, by a step's hidden states."""
        count = len(order.targets)
        ids = np.zeros(_ROWS, np.int32)
        ids[:count] = order.targets
        hidden = np.asarray(output.hidden)
        block = np.zeros((_ROWS, hidden.shape[1]), hidden.dtype)
        block[:count] = hidden[order.begin : order.begin + count]
        return self._program(self._weights, block, ids)


def _compile(head: LoadedModel, weights: list[Array], tree: WeightsTree, max_logprobs: int) -> Any:
    def score(weights, hidden, targets):
        decoder = nnx.merge(head.graphdef, tree.unflatten(weights))
        logits = decoder.logits(hidden, jnp.full(1, _ROWS, jnp.int32))
        scored = partial(token_logprobs, max_logprobs=max_logprobs)
        return over_vocabulary(scored, head.mesh)(logits, targets)

    hidden = jax.ShapeDtypeStruct((_ROWS, head.config.hidden_size), head.dtype)
    targets = jax.ShapeDtypeStruct((_ROWS,), jnp.int32)
    jitted = jax.jit(score, out_shardings=head.place.sharding(PartitionSpec()))
    return jitted.lower(shapes_of(weights), hidden, targets).compile()


def row_logprobs(
    scored: Logprobs | SampledTokens, row: int, token_id: int, top: int
) -> TokenLogprobs:
    """One row of what was scored, with its `top` most likely tokens."""
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(scored.logprob[row]),
        rank=int(scored.rank[row]),
        top_ids=tuple(np.asarray(scored.top_ids[row, :top]).tolist()),
        top_logprobs=tuple(np.asarray(scored.top_logprobs[row, :top]).tolist()),
    )
