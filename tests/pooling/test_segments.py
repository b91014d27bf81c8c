"""Attention of sequences side by side is that of each alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.nn import segments
from llmjax_kernels.paged_attention import AttentionSpec

LENGTHS = (5, 1, 9, 4)


def alone(q: np.ndarray, k: np.ndarray, v: np.ndarray, spec: AttentionSpec, causal: bool):
    """One sequence, head by head."""
    n, N, _ = q.shape
    out = np.zeros_like(q)
    distance = np.arange(n)[:, None] - np.arange(n)
    seen = (distance >= 0) | (not causal)
    seen &= distance < (spec.window or n)
    for head in range(N):
        kv = head // (N // k.shape[1])
        scores = spec.softcap * np.tanh(spec.scale * q[:, head] @ k[:, kv].T / spec.softcap)
        weights = np.where(seen, np.exp(scores), 0)
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, kv]
    return out


@pytest.mark.parametrize(
    ("block", "window", "causal"), [(512, None, True), (8, 3, True), (8, None, False)]
)
def test_each_sequence_is_as_if_alone(monkeypatch, block, window, causal):
    monkeypatch.setattr(segments, "QUERIES", block)
    rng = np.random.default_rng(0)
    T, spec = sum(LENGTHS), AttentionSpec(0.5, window, 20.0)
    q = rng.normal(size=(T, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, T, 2, 8)).astype(np.float32)
    positions = np.concatenate([np.arange(n) for n in LENGTHS]).astype(np.int32)
    ids = np.repeat(np.arange(len(LENGTHS)), LENGTHS).astype(np.int32)

    @jax.jit
    def attend(ids, positions, q, k, v):
        context = segments.SegmentContext(ids, positions, causal=causal)
        return context.attend(0, q, k, v, spec)

    got = attend(*map(jnp.asarray, (ids, positions, q, k, v)))
    for i in range(len(LENGTHS)):
        at = ids == i
        np.testing.assert_allclose(got[at], alone(q[at], k[at], v[at], spec, causal), atol=1e-5)
