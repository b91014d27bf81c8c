import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from llmjax.sampling import blocks

SIZES = (1, 64, 257, 20_001)


@jax.jit
def argmax(logits):
    return blocks.argmax(logits, blocks.block_maxima(logits))


@functools.partial(jax.jit, static_argnums=1)
def top_k(logits, k):
    return blocks.top_k(logits, blocks.block_maxima(logits), k)


def tied(V, seed=0, rows=3):
    return np.random.default_rng(seed).integers(-3, 3, (rows, V)).astype(np.float32)


@pytest.mark.parametrize("V", SIZES)
def test_argmax_is_the_first_greatest(V):
    for logits in (tied(V), np.random.default_rng(1).normal(size=(3, V)).astype(np.float32)):
        np.testing.assert_array_equal(argmax(logits), logits.argmax(-1))


@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("k", (1, 20, 80))
def test_top_k_equals_lax(V, k):
    for logits in (tied(V), np.random.default_rng(1).normal(size=(3, V)).astype(np.float32)):
        values, ids = top_k(logits, k)
        n = min(k, V)
        want_values, want_ids = lax.top_k(logits, n)
        np.testing.assert_array_equal(values[:, :n], want_values)
        np.testing.assert_array_equal(ids[:, :n], want_ids)
        assert values.shape == (3, k) and np.all(np.asarray(values[:, n:]) == -np.inf)


def test_top_k_keeps_the_lowest_ids_of_a_tie_that_spans_blocks():
    logits = np.zeros((1, 64 * 100), np.float32)
    logits[0, 64 * 50] = 1  # its block is picked first and has later ids of the tie
    _, ids = top_k(logits, 5)
    np.testing.assert_array_equal(ids[0], [64 * 50, 0, 1, 2, 3])


@pytest.mark.parametrize("V", SIZES)
def test_broken_rows_give_ids_in_range(V):
    logits = np.full((3, V), -np.inf, np.float32)
    logits[1, V // 2], logits[2, V // 3] = np.nan, np.inf
    ids = np.asarray(argmax(logits))
    assert ids[0] == 0 and np.all((ids >= 0) & (ids < V))
    assert np.all(np.asarray(top_k(logits, 1)[1]) < V)


@pytest.mark.parametrize("V", SIZES)
def test_lane_sums_add_every_token_once(V):
    logits = np.random.default_rng(0).normal(size=(3, V)).astype(np.float32)
    got = jax.jit(lambda x: blocks.lane_sums(x, jnp.exp))(logits)
    n = got.shape[1]
    want = [np.exp(logits[:, j::n].astype(np.float64)).sum(-1) for j in range(n)]
    np.testing.assert_allclose(got, np.stack(want, 1), rtol=1e-5)
