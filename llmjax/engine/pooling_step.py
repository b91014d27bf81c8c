"""The jitted step of a model that pools, and what goes into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from ..checkpoint import PoolingConfig, PoolingModel
from ..errors import ConfigError
from ..models import Encoder
from ..nn.segments import SegmentContext
from .pooling_inputs import PoolingInput

_LEAST = 16


class PoolingBatch(NamedTuple):
    """Texts side by side: T tokens of up to S texts, then padding.

    Attributes:
        tokens, positions, types: of each token, int32 [T].
        segments: which text it is of, int32 [T]; of padding S.
        starts, counts: the first token of each text and how many it has, int32 [S].
    """

    tokens: Any
    positions: Any
    types: Any
    segments: Any
    starts: Any
    counts: Any


class PoolingBuckets:
    """The static sizes of steps: T tokens, of up to S texts.

    Args:
        given: values of T; by default powers of two.
        step_tokens: what steps of several texts are filled up to.
        max_model_len: tokens of the longest text.
        max_num_seqs: most texts in a step.

    Attributes:
        all: values of T, ascending.
        step_tokens: as given, or what the largest has.

    Raises:
        ConfigError: `given` has none for the longest text.
    """

    def __init__(
        self,
        given: Sequence[int] | None,
        *,
        step_tokens: int,
        max_model_len: int,
        max_num_seqs: int,
    ):
        most = max(step_tokens, max_model_len)
        if given is None:
            ladder = [_LEAST << i for i in range(64) if _LEAST << i < most]
            given = [*ladder, most]
        self.all = sorted(given)
        if self.all[-1] < max_model_len:
            raise ConfigError(
                f"token_buckets is {tuple(given)}, allowed: with one of {max_model_len} "
                "(max_model_len) or more, as a text is computed in one step"
            )
        self.step_tokens = min(step_tokens, self.all[-1])
        self._max_num_seqs = max_num_seqs
        self._ready: list[int] = []

    def seqs(self, T: int) -> int:
        """S: most texts in a step of T tokens."""
        return min(T, self._max_num_seqs)

    def compile_order(self) -> tuple[list[int], list[int]]:
        """What must be there first: the largest serves everything. Then the rest."""
        *others, largest = self.all
        return [largest], others

    def mark_ready(self, T: int) -> None:
        self._ready = sorted([*self._ready, T])

    def choose(self, tokens: int, texts: int) -> int:
        """The smallest T whose program is ready."""
        return next(T for T in self._ready if tokens <= T and texts <= self.seqs(T))

    def table(self) -> str:
        """For people."""
        return f"steps     {', '.join(map(str, self.all))} tokens"

    def empty(self, T: int) -> PoolingBatch:
        """Padding alone."""
        S = self.seqs(T)
        tokens, positions, types = np.zeros((3, T), np.int32)
        starts, counts = np.zeros((2, S), np.int32)
        return PoolingBatch(tokens, positions, types, np.full(T, S, np.int32), starts, counts)

    def pack(self, inputs: Sequence[PoolingInput], T: int) -> PoolingBatch:
        """Puts texts side by side; they fit."""
        batch, at = self.empty(T), 0
        for i, each in enumerate(inputs):
            n = len(each.token_ids)
            here = slice(at, at + n)
            batch.tokens[here] = each.token_ids
            batch.positions[here] = np.arange(n)
            batch.types[here] = each.types or 0
            batch.segments[here] = i
            batch.starts[i], batch.counts[i] = at, n
            at += n
        return batch


def make_pool(
    model: PoolingModel, treedef: Any
) -> Callable[[list[Array], PoolingBatch], tuple[Float[Array, "S D"], Float[Array, "T D"]]]:
    """(arrays of the model's state, batch) -> float32 vectors, of places without a text anything,
    and the hidden states of tokens, which stay on the device unless somebody wants them.

    A row is a function of its text alone, but for how sums of different sizes are rounded.
    """
    graphdef, pooling = model.graphdef, model.pooling

    def pool(weights: list[Array], batch: PoolingBatch) -> tuple[Array, Array]:
        module = nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))
        is_encoder = isinstance(module, Encoder)
        context = SegmentContext(batch.segments, batch.positions, causal=not is_encoder)
        if is_encoder:
            hidden = module.hidden(batch.tokens, batch.positions, batch.types, context)
        else:
            lens = jnp.maximum(batch.counts[jnp.minimum(batch.segments, len(batch.counts) - 1)], 1)
            hidden = module.hidden(batch.tokens, batch.positions, lens, context)
        pooled = pool_hidden(hidden, batch, pooling)
        return (module.score(pooled) if pooling.task == "score" else pooled), hidden

    return pool


def pool_hidden(
    hidden: Float[Array, "T D"], batch: PoolingBatch, pooling: PoolingConfig
) -> Float[Array, "S D"]:
    """One float32 vector of each text's tokens."""
    S = len(batch.counts)
    wide = hidden.astype(jnp.float32)
    if pooling.mode == "mean":
        sums = jax.ops.segment_sum(wide, batch.segments, S)
        pooled = sums / jnp.maximum(batch.counts, 1)[:, None]
    elif pooling.mode == "max":
        pooled = jax.ops.segment_max(wide, batch.segments, S)
    else:
        last = jnp.maximum(batch.counts - 1, 0) if pooling.mode == "last" else 0
        pooled = wide[batch.starts + last]
    if pooling.normalize:
        length = jnp.linalg.norm(pooled, axis=-1, keepdims=True)
        pooled /= jnp.maximum(length, 1e-12)
    return pooled
