"""Attention of whole sequences that lie side by side in one row of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from llmjax_kernels.paged_attention import AttentionSpec

QUERIES = 512
"""Queries whose scores are in memory together."""


class SegmentContext:
    """Computes sequences whole; keeps no keys or values.

    Takes the place of `PagedContext` where nothing is to be generated.

    Args:
        segments: which sequence each token is of; sequences do not see each other.
        positions: of each token in its sequence.
        causal: a token sees those before it only.
    """

    def __init__(self, segments: Int[Array, " T"], positions: Int[Array, " T"], *, causal: bool):
        self._segments, self._positions, self._causal = segments, positions, causal

    def attend(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        spec: AttentionSpec,
    ) -> Float[Array, "T N H"]:
        def attend(queries: tuple[Array, Array, Array]) -> Array:
            q, segments, positions = queries
            return attend_where(q, k, v, self._seen(segments, positions, spec.window), spec)

        T = q.shape[0]
        queries = (q, self._segments, self._positions)
        if T <= QUERIES:
            return attend(queries)
        pad = -T % QUERIES
        blocks = [
            jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, QUERIES, *x.shape[1:])
            for x in queries
        ]
        return jax.lax.map(attend, tuple(blocks)).reshape(T + pad, *q.shape[1:])[:T]

    def _seen(
        self, segments: Int[Array, " Q"], positions: Int[Array, " Q"], window: int | None
    ) -> Bool[Array, "Q T"]:
        """Which tokens queries see."""
        seen = segments[:, None] == self._segments
        distance = positions[:, None] - self._positions
        if self._causal:
            seen &= distance >= 0
        if window is not None:
            seen &= distance < window
        return seen


def attend_where(
    q: Float[Array, "Q N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    seen: Bool[Array, "Q T"],
    spec: AttentionSpec,
) -> Float[Array, "Q N H"]:
    """Attention of each query to the keys it sees, of which there must be one."""
    Q, N, H = q.shape
    K = k.shape[1]
    grouped = q.reshape(Q, K, N // K, H)
    scores = jnp.einsum("qkgh,tkh->kgqt", grouped, k, preferred_element_type=jnp.float32)
    scores *= spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("kgqt,tkh->qkgh", weights.astype(v.dtype), v).reshape(Q, N, H)
