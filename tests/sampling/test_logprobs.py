import functools

import jax
import numpy as np
import pytest
from reference import log_softmax

from llmjax.sampling import token_logprobs

run = jax.jit(token_logprobs, static_argnames="max_logprobs")


@pytest.mark.parametrize(("V", "k"), ((1, 1), (7, 20), (257, 5), (5000, 64), (49152, 20)))
def test_equals_log_softmax(V, k):
    rng = np.random.default_rng(V)
    logits = (rng.normal(size=(4, V)) * 4).astype(np.float32)
    ids = rng.integers(0, V, 4).astype(np.int32)
    got = run(logits, ids, max_logprobs=k)
    want = log_softmax(logits)
    np.testing.assert_allclose(got.logprob, want[np.arange(4), ids], rtol=1e-5, atol=1e-5)
    rank = 1 + (logits > logits[np.arange(4), ids][:, None]).sum(-1)
    np.testing.assert_array_equal(got.rank, rank)
    n = min(k, V)
    order = np.argsort(-logits, -1, kind="stable")[:, :n]
    np.testing.assert_array_equal(got.top_ids[:, :n], order)
    want_top = np.take_along_axis(want, order, 1)
    np.testing.assert_allclose(got.top_logprobs[:, :n], want_top, rtol=1e-5, atol=1e-5)
    assert np.all(np.asarray(got.top_logprobs[:, n:]) == -np.inf)
    assert np.all(np.asarray(got.top_ids) < V)


def test_tied_tokens_share_the_better_rank():
    logits = np.array([[1.0, 2, 2, 0]] * 4, np.float32)
    got = run(logits, np.arange(4, dtype=np.int32), max_logprobs=2)
    np.testing.assert_array_equal(got.rank, [3, 1, 1, 4])
    np.testing.assert_array_equal(got.top_ids, [[1, 2]] * 4)


def test_numbers_stay_finite():
    rows = [[np.inf, 0, 1], [np.nan, np.nan, 5], [-np.inf] * 3, [3e38, -3e38, 0]]
    logits = np.array(rows, np.float32)
    for token in range(3):
        got = run(logits, np.full(4, token, np.int32), max_logprobs=3)
        for field in got:
            assert np.all(np.isfinite(field))


def test_most_likely_tokens_are_found_on_demand():
    logits = np.random.default_rng(0).normal(size=(2, 300)).astype(np.float32)
    ask = jax.jit(functools.partial(token_logprobs, max_logprobs=4))
    ids = np.array([3, 4], np.int32)
    without, full = ask(logits, ids, want_top=False), ask(logits, ids, want_top=True)
    np.testing.assert_array_equal(without.logprob, full.logprob)
    assert not np.any(without.top_ids) and np.any(full.top_ids)
    assert run(logits, ids, max_logprobs=0).top_ids.shape == (2, 0)
