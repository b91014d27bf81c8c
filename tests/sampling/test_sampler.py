from functools import partial

import jax
import numpy as np
import pytest
from reference import (
    as_masks,
    chi_square_is_plausible,
    distribution,
    log_softmax,
    make_rows,
    no_masks,
)

from llmjax.sampling import BiasTable, SampledTokens, SamplingRows, sample
from llmjax.sampling.rows import at_once

run = jax.jit(sample, static_argnames="max_logprobs")


def table(slots, B=4):
    shape = (slots, B)
    return BiasTable(
        np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    )


def choose(logits, rows, history=None, bias=None):
    S = len(logits)
    history = np.zeros((S, 40), np.int32) if history is None else history
    bias = table(S) if bias is None else bias
    return run(logits, rows, history, bias, no_masks(logits), max_logprobs=6)


def widen(logits, S=5, V=257):
    """Small cases in the shape of a program that is compiled already."""
    wide = np.full((S, V), -np.inf, np.float32)
    wide[: len(logits), : len(logits[0])] = logits
    return wide


def model_like(S, V, seed=0):
    """A few likely tokens above a long tail, with ties."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(S, V)) * 2 + 6 * (rng.random((S, V)) < 20 / V)
    return (np.round(logits * 32) / 32).astype(np.float32)


TRUNCATIONS = {
    "temperature 1": {"temperature": 1.0},
    "temperature 1.7": {"temperature": 1.7},
    "top_k 5": {"temperature": 1.0, "top_k": 5},
    "top_k 100": {"temperature": 1.5, "top_k": 100},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top_p 0.3": {"temperature": 1.5, "top_p": 0.3},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "top_k 40, top_p 0.8": {"temperature": 0.7, "top_k": 40, "top_p": 0.8},
    "top_k 120, top_p 0.8": {"temperature": 1.9, "top_k": 120, "top_p": 0.8},
    "min_p 0.02, top_p 0.7": {"temperature": 1.9, "min_p": 0.02, "top_p": 0.7},
    "all": {"temperature": 1.2, "min_p": 0.01, "top_k": 50, "top_p": 0.95},
}


@pytest.mark.parametrize("params", TRUNCATIONS.values(), ids=TRUNCATIONS.keys())
def test_tokens_are_drawn_from_the_exact_distribution(params):
    V, draws = 257, 20_000
    logits = model_like(1, V, seed=3)
    rows = make_rows(draws, seed=11, position=np.arange(draws), **params)
    ids = np.asarray(choose(np.tile(logits, (draws, 1)), rows).token_ids)
    expected = distribution(logits[0], **params)
    assert chi_square_is_plausible(np.bincount(ids, minlength=V), expected)


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.8}])
def test_masked_rows_draw_from_what_is_allowed(params):
    V, draws = 257, 20_000
    logits = model_like(1, V, seed=5)
    allowed = np.random.default_rng(2).random((1, V)) < 0.1
    rows = make_rows(
        draws, seed=7, position=np.arange(draws), temperature=1.2, masked=True, **params
    )
    masks = np.tile(as_masks(allowed), (draws, 1))
    batch = (np.tile(logits, (draws, 1)), rows, np.zeros((draws, 40), np.int32), table(draws))
    ids = np.asarray(run(*batch, masks, max_logprobs=6).token_ids)
    expected = distribution(np.where(allowed, logits, -np.inf)[0], 1.2, **params)
    assert chi_square_is_plausible(np.bincount(ids, minlength=V), expected)


def test_seeds_are_as_good_as_positions():
    V, draws = 257, 20_000
    logits = model_like(1, V, seed=4)
    rows = make_rows(draws, seed=np.arange(draws), position=5, temperature=1.0, top_p=0.9)
    ids = np.asarray(choose(np.tile(logits, (draws, 1)), rows).token_ids)
    expected = distribution(logits[0], 1.0, top_p=0.9)
    assert chi_square_is_plausible(np.bincount(ids, minlength=V), expected)


def mixed_batch(S, V):
    """Rows that together want everything the sampler can do."""
    rng = np.random.default_rng(7)
    pick = lambda *options: rng.choice(options, S)  # noqa: E731
    rows = make_rows(
        S,
        temperature=pick(0, 0.7, 1, 1.5),
        top_k=pick(0, 0, 3, 40, 100),
        top_p=pick(1, 0.95, 0.5),
        min_p=pick(0, 0, 0.05),
        repetition_penalty=pick(1, 1, 1.3),
        presence_penalty=pick(0, 0.5),
        frequency_penalty=pick(0, 0.2),
        seed=rng.integers(0, 2**32, S),
        position=rng.integers(0, 1000, S),
        prompt_len=rng.integers(0, 20, S),
        kv_len=rng.integers(20, 40, S),
        slot=rng.permutation(S),
        num_bias=pick(0, 0, 4),
        num_logprobs=pick(-1, 0, 5),
        masked=pick(False, True),
    )
    history = rng.integers(0, V, (S, 40)).astype(np.int32)
    bias = BiasTable(
        rng.integers(0, V, (S, 4)).astype(np.int32),
        rng.choice([-np.inf, 8, -2], (S, 4)).astype(np.float32),
        np.full((S, 4), 2**31 - 1, np.int32),
    )
    masks = as_masks(rng.random((S, V)) < 0.2)
    return model_like(S, V), rows, history, bias, masks


@pytest.mark.parametrize("size", (1, 5))
def test_a_row_gives_the_same_token_in_any_batch(size):
    S = 48
    logits, rows, history, bias, masks = mixed_batch(S, 257)
    crowd = run(logits, rows, history, bias, masks, max_logprobs=6)
    for trial in range(60 // size):
        some = np.random.default_rng(trial).choice(S, size, replace=False)
        some_slots = rows.slot[some]
        some_rows = SamplingRows(*(field[some] for field in rows))
        some_rows = some_rows._replace(slot=np.arange(size, dtype=np.int32))
        some_bias = BiasTable(*(field[some_slots] for field in bias))
        some_args = (logits[some], some_rows, history[some_slots], some_bias, masks[some])
        alone = run(*some_args, max_logprobs=6)
        np.testing.assert_array_equal(alone.token_ids, crowd.token_ids[some])
        asks = rows.num_logprobs[some] >= 0
        np.testing.assert_array_equal(alone.logprob[asks], crowd.logprob[some][asks])
        np.testing.assert_array_equal(alone.rank[asks], crowd.rank[some][asks])
        asks = rows.num_logprobs[some] > 0
        np.testing.assert_array_equal(alone.top_ids[asks], crowd.top_ids[some][asks])


def test_all_rows_at_once_gives_the_same(monkeypatch):
    batch = mixed_batch(48, 257)
    one_by_one = run(*batch, max_logprobs=6)
    for module in ("sampler", "adjust"):
        monkeypatch.setattr(f"llmjax.sampling.{module}.map_rows", at_once)
    together = jax.jit(lambda *args: sample(*args, max_logprobs=6))(*batch)
    np.testing.assert_array_equal(together.token_ids, one_by_one.token_ids)


def test_devices_that_share_a_vocabulary_choose_as_one():
    """Three, whose tokens begin amid the lanes that sums are made of; the last is no token."""
    S, V, devices = 48, 257, 3
    logits, *rest = mixed_batch(S, V)
    one = run(logits, *rest, max_logprobs=6)
    logits = np.pad(logits, ((0, 0), (0, 1)), constant_values=-np.inf)

    @jax.jit
    def share(parts, *rest):
        choose = partial(sample, max_logprobs=6, axis="tensor")
        return jax.vmap(choose, (0, *[None] * len(rest)), axis_name="tensor")(parts, *rest)

    found = share(logits.reshape(S, devices, -1).swapaxes(0, 1), *rest)
    asks = rest[0].num_logprobs
    for device in range(devices):
        of = SampledTokens(*(field[device] for field in found))
        np.testing.assert_array_equal(of.token_ids, one.token_ids)
        np.testing.assert_array_equal(of.rank[asks >= 0], one.rank[asks >= 0])
        np.testing.assert_allclose(of.logprob[asks >= 0], one.logprob[asks >= 0], rtol=1e-5)
        np.testing.assert_array_equal(of.top_ids[asks > 0], one.top_ids[asks > 0])


def test_greedy_takes_the_first_of_the_best():
    logits = widen([[0, 3, 3, 1], [5, 3, 5, 1]])
    rows = make_rows(5, seed=3, top_k=3, top_p=0.1, min_p=0.5)
    np.testing.assert_array_equal(choose(logits, rows).token_ids[:2], [1, 0])


def test_truncation_to_one_token_is_greedy():
    logits = np.random.default_rng(0).normal(size=(5, 257)).astype(np.float32)
    params = {
        "top_k": [1, 0, 0, 1, 100],
        "top_p": [1, 1e-6, 1, 0.5, 1e-6],
        "min_p": [0, 0, 1, 0, 0],
    }
    for position in range(20):
        rows = make_rows(5, temperature=2.0, position=position, **params)
        np.testing.assert_array_equal(choose(logits, rows).token_ids, logits.argmax(-1))


def test_greedy_obeys_penalties_bias_and_bans():
    logits = widen([[4.0, 3, 2, 1]] * 3)
    history = np.tile(np.array([0, 0, 1, 1] * 10, np.int32), (5, 1))
    bias = table(5)
    bias.ids[:], bias.until[:] = [0, 3, 0, 0], 2**31 - 1
    bias.values[1, :2], bias.values[2, :2] = [-np.inf, 0], [0, 5]
    penalty, num_bias = [3, 1, 1, 1, 1], [0, 2, 2, 0, 0]
    rows = make_rows(5, repetition_penalty=penalty, prompt_len=2, kv_len=4, num_bias=num_bias)
    got = choose(logits, rows, history, bias)
    np.testing.assert_array_equal(got.token_ids[:3], [2, 1, 3])


def test_logprobs_are_of_the_raw_logits():
    logits, rows, history, bias, masks = mixed_batch(48, 257)
    rows = rows._replace(num_logprobs=np.full(48, 2, np.int32))
    got = run(logits, rows, history, bias, masks, max_logprobs=6)
    want = log_softmax(logits)
    ids = np.asarray(got.token_ids)
    np.testing.assert_allclose(got.logprob, want[np.arange(48), ids], rtol=1e-5, atol=1e-5)
    rank = 1 + (logits > logits[np.arange(48), ids][:, None]).sum(-1)
    np.testing.assert_array_equal(got.rank, rank)
    np.testing.assert_array_equal(got.top_ids[:, 0], logits.argmax(-1))


def test_broken_logits_give_ids_in_range_and_banned_ones_never_come():
    V = 257
    cases = np.random.default_rng(0).normal(size=(5, V)).astype(np.float32)
    cases[0] = -np.inf
    cases[1, :200] = -np.inf
    cases[2] = np.nan
    cases[3, ::2] = np.nan
    cases[4, ::3] = np.inf
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.3, "top_k": 100, "top_p": 0.9}):
        rows = make_rows(5, seed=1, num_logprobs=2, **params)
        got = choose(cases, rows)
        ids = np.asarray(got.token_ids)
        assert ids.dtype == np.int32 and np.all((ids >= 0) & (ids < V))
        assert ids[0] == 0 and ids[1] >= 200
        assert np.all(np.isfinite(got.logprob)) and np.all(np.asarray(got.top_ids) < V)


@pytest.mark.parametrize("V", (49152, 262144))
def test_large_vocabularies(V):
    logits = model_like(4, V)
    params = {"temperature": [0, 1, 1, 0.8], "top_p": [1, 1, 0.9, 0.9], "top_k": [0, 0, 0, 20]}
    for position in range(3):
        rows = make_rows(4, seed=5, position=position, num_logprobs=1, **params)
        got = choose(logits, rows)
        ids = np.asarray(got.token_ids)
        assert ids[0] == logits[0].argmax()
        np.testing.assert_array_equal(got.top_ids[:, 0], logits.argmax(-1))
        for i in (1, 2, 3):
            row = {name: values[i] for name, values in params.items()}
            assert distribution_of_large(logits[i], **row)[ids[i]] > 0


def distribution_of_large(logits, temperature, top_p, top_k):
    """`reference.distribution` by sorting."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    values = -np.sort(-x)
    if top_k:
        p = np.where(x >= values[top_k - 1], p, 0)
    mass = np.cumsum(-np.sort(-p))
    limit = values[np.searchsorted(mass, top_p * mass[-1])] if top_p < 1 else -np.inf
    return np.where(x >= limit, p, 0)
