import jax
import numpy as np
import pytest
from jax import lax

from llmjax.sampling import blocks

SIZES = (1, 3, 63, 64, 65, 257, 4096, 5001)


def tied(V, seed=0, rows=3):
    return np.random.default_rng(seed).integers(-3, 3, (rows, V)).astype(np.float32)


@pytest.mark.parametrize("V", SIZES)
def test_argmax_is_the_first_greatest(V):
    for logits in (tied(V), np.random.default_rng(1).normal(size=(3, V)).astype(np.float32)):
        got = jax.jit(lambda x: blocks.argmax(x, blocks.block_maxima(x)))(logits)
        np.testing.assert_array_equal(got, logits.argmax(-1))


@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("k", (1, 20, 64, 80))
def test_top_k_equals_lax(V, k):
    for logits in (tied(V), np.random.default_rng(1).normal(size=(3, V)).astype(np.float32)):
        values, ids = jax.jit(lambda x: blocks.top_k(x, blocks.block_maxima(x), k))(logits)
        n = min(k, V)
        want_values, want_ids = lax.top_k(logits, n)
        np.testing.assert_array_equal(values[:, :n], want_values)
        np.testing.assert_array_equal(ids[:, :n], want_ids)
        assert values.shape == (3, k) and np.all(np.asarray(values[:, n:]) == -np.inf)


def test_top_k_keeps_the_lowest_ids_of_a_tie_that_spans_blocks():
    logits = np.zeros((1, 64 * 100), np.float32)
    logits[0, 64 * 50] = 1  # its block is picked first and has later ids of the tie
    _, ids = blocks.top_k(logits, blocks.block_maxima(logits), 5)
    np.testing.assert_array_equal(ids[0], [64 * 50, 0, 1, 2, 3])


def test_no_number_is_the_least_and_infinity_the_greatest():
    logits = np.array([[np.nan, 1, np.inf, -np.inf], [np.nan, -np.inf, -1, np.nan]], np.float32)
    got = blocks.argmax(logits, blocks.block_maxima(logits))
    np.testing.assert_array_equal(got, [2, 2])
    nothing = np.full((2, 70), np.nan, np.float32)
    np.testing.assert_array_equal(blocks.argmax(nothing, blocks.block_maxima(nothing)), [0, 0])
