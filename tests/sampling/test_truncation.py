import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import kept, make_rows

from llmjax.sampling import blocks
from llmjax.sampling.rows import at_once, one_by_one
from llmjax.sampling.truncation import MAX_GAP, Scale, limit_among, limit_by_search

S, K = 4, 64


@jax.jit
def by_search(logits, rows):
    scale = Scale(blocks.block_maxima(logits).max(-1), rows.temperature)
    gap = scale.gaps(logits)
    return gap <= limit_by_search(logits, scale, rows)[:, None]


@jax.jit
def by_candidates(logits, rows):
    maxima = blocks.block_maxima(logits)
    scale = Scale(maxima.max(-1), rows.temperature)
    values, _ = blocks.top_k(logits, maxima, min(K, logits.shape[1]))
    limit, holds = limit_among(scale.gaps(values), rows, logits.shape[1])
    return scale.gaps(logits) <= limit[:, None], holds


def assert_kept(mask, logits, **params):
    """Equal to the reference, but for tokens at top_p or min_p to within rounding."""
    least, most = kept(logits, **params, slack=-1e-5), kept(logits, **params, slack=1e-5)
    assert np.all(mask[least]) and not np.any(mask[~most])
    assert mask[logits.argmax()]


params_strategy = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.7, 1.0, 1.9]),
        "top_k": st.one_of(st.just(0), st.integers(1, 300)),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    V=st.sampled_from([1, 40, 257]),
    grid=st.sampled_from([0, 4, 64]),
    params=st.lists(params_strategy, min_size=S, max_size=S),
)
def test_kept_tokens_are_the_reference_ones(seed, V, grid, params):
    logits = np.random.default_rng(seed).normal(size=(S, V)).astype(np.float32) * 3
    if grid:  # many ties
        logits = (np.round(logits * grid / 4) * (4 / grid)).astype(np.float32)
    rows = make_rows(S, **{name: [p[name] for p in params] for name in params[0]})
    searched = np.asarray(by_search(logits, rows))
    among, holds = map(np.asarray, by_candidates(logits, rows))
    for i, row in enumerate(params):
        assert_kept(searched[i], logits[i], **row)
        if holds[i]:
            assert_kept(among[i], logits[i], **row)
        if 0 < row["top_k"] <= min(K, V) and (V <= K or (not grid and row["top_k"] < K)):
            assert holds[i]


def test_all_of_a_tie_at_the_threshold_stay():
    logits = np.array([[3.0, 1, 1, 1, 0, 0]], np.float32)
    for params in ({"top_k": 2}, {"top_p": 0.75}):
        rows = make_rows(1, temperature=1.0, **params)
        np.testing.assert_array_equal(by_search(logits, rows)[0], [1, 1, 1, 1, 0, 0])
        if "top_k" in params:
            np.testing.assert_array_equal(by_candidates(logits, rows)[0][0], [1, 1, 1, 1, 0, 0])


def test_top_p_works_on_what_top_k_left():
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    # Of all four, 0.4 + 0.3 is short of 0.71; of the first two it is the whole.
    alone = by_search(logits, make_rows(1, temperature=1.0, top_p=0.55))
    both = by_search(logits, make_rows(1, temperature=1.0, top_p=0.55, top_k=2))
    np.testing.assert_array_equal(alone[0], [1, 1, 0, 0])
    np.testing.assert_array_equal(both[0], [1, 0, 0, 0])


def test_tokens_that_cannot_matter_are_cut():
    logits = np.array([[0.0, -MAX_GAP + 1, -MAX_GAP - 1, -np.inf]], np.float32)
    mask = by_search(logits, make_rows(1, temperature=1.0))
    np.testing.assert_array_equal(mask[0], [1, 1, 0, 0])


@pytest.mark.parametrize("visit", (one_by_one, at_once))
@pytest.mark.parametrize("flags", ([0, 1, 0, 1, 1], [0] * 5, [1] * 5))
def test_only_flagged_rows_change(visit, flags):
    flags = jnp.asarray(flags, bool)
    values = jnp.arange(10.0).reshape(5, 2)
    got = jax.jit(lambda v: visit(flags, lambda ids: -v[ids] - ids[:, None], v))(values)
    want = np.where(flags[:, None], -values - np.arange(5)[:, None], values)
    np.testing.assert_array_equal(got, want)
