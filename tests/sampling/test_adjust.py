import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import as_masks, make_rows, no_masks, penalise

from llmjax.sampling import BiasTable
from llmjax.sampling.adjust import adjust
from llmjax.sampling.rows import at_once

FOREVER = 2**31 - 1
SLOTS, MAX_LEN, B = 6, 40, 40
jitted = jax.jit(adjust)


def run(logits, rows, history, bias, masks=None):
    return jitted(logits, rows, history, bias, no_masks(logits) if masks is None else masks)


def empty_table():
    shape = (SLOTS, B)
    return BiasTable(
        np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    )


def no_history():
    return np.zeros((SLOTS, MAX_LEN), np.int32)


row_strategy = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.1, 2.0]),
        "presence_penalty": st.sampled_from([0.0, -1.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.3, 1.7]),
        "prompt_len": st.integers(0, MAX_LEN),
        "kv_len": st.integers(0, MAX_LEN),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    params=st.lists(row_strategy, min_size=4, max_size=4),
    slots=st.permutations(range(SLOTS)),
)
def test_penalties_follow_the_formulas(seed, params, slots):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(4, 30)).astype(np.float32)
    history = rng.integers(0, 30, (SLOTS, MAX_LEN)).astype(np.int32)
    slot = slots[:4]
    columns = {name: [p[name] for p in params] for name in params[0]}
    got = run(logits, make_rows(4, slot=slot, **columns), history, empty_table())
    for i, p in enumerate(params):
        tokens = history[slot[i]][: p["kv_len"]].tolist()
        strengths = (p[f"{name}_penalty"] for name in ("repetition", "presence", "frequency"))
        want = penalise(logits[i], tokens[: p["prompt_len"]], tokens[p["prompt_len"] :], *strengths)
        np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-5)


def test_a_long_history_is_counted_whole():
    history = np.tile(np.arange(3, dtype=np.int32), 1000)[None, :2000]
    rows = make_rows(1, frequency_penalty=1.0, prompt_len=500, kv_len=1999)
    table = BiasTable(*(field[:1] for field in empty_table()))
    got = run(np.zeros((1, 5), np.float32), rows, history, table)
    np.testing.assert_array_equal(-got[0], [*np.bincount(history[0, 500:1999]), 0, 0])


def test_unpenalised_rows_come_back_bit_for_bit():
    logits = np.random.default_rng(0).normal(size=(3, 100)).astype(np.float32)
    rows = make_rows(3, repetition_penalty=[1, 1.3, 1], kv_len=MAX_LEN, num_bias=[0, 0, 1])
    got = run(logits, rows, no_history(), empty_table())
    np.testing.assert_array_equal(got[0], logits[0])
    assert got[1, 0] != logits[1, 0]


def test_all_rows_at_once_gives_the_same(monkeypatch):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 30)).astype(np.float32)
    history = rng.integers(0, 30, (SLOTS, MAX_LEN)).astype(np.int32)
    rows = make_rows(
        4,
        repetition_penalty=[1, 2, 1, 3],
        prompt_len=5,
        kv_len=[9, 30, 40, 2],
        masked=[False, True, True, False],
    )
    masks = as_masks(rng.random((4, 30)) < 0.5)
    one_by_one = run(logits, rows, history, empty_table(), masks)
    forbidden = ~np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :30].astype(bool)
    forbidden[[0, 3]] = False
    np.testing.assert_array_equal(np.isneginf(one_by_one), forbidden)
    monkeypatch.setattr("llmjax.sampling.adjust.map_rows", at_once)
    args = (logits, rows, history, empty_table(), masks)
    together = jax.jit(lambda *args: adjust(*args))(*args)
    np.testing.assert_array_equal(together, one_by_one)


@pytest.mark.parametrize("num_bias", (0, 1, 3, 35, 40))
def test_biases_are_added_while_they_hold(num_bias):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 50)).astype(np.float32)
    table = BiasTable(
        rng.permuted(np.tile(np.arange(50, dtype=np.int32), (SLOTS, 1)), axis=1)[:, :B],
        rng.normal(size=(SLOTS, B)).astype(np.float32),
        rng.choice([0, 4, 5, FOREVER], (SLOTS, B)).astype(np.int32),
    )
    rows = make_rows(3, slot=[4, 0, 2], num_bias=num_bias, prompt_len=7, kv_len=11)
    got = run(logits, rows, no_history(), table)
    want = logits.copy()
    for i, slot in enumerate((4, 0, 2)):
        for j in range(num_bias):
            if table.until[slot, j] > 4:
                want[i, table.ids[slot, j]] += table.values[slot, j]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_ban_ends_after_min_tokens():
    table = empty_table()
    table.ids[0, :2], table.values[0, :2], table.until[0, :2] = [3, 3], [5, -np.inf], [FOREVER, 2]
    logits = np.zeros((1, 8), np.float32)
    seen = [
        float(
            run(logits, make_rows(1, num_bias=2, prompt_len=6, kv_len=n), no_history(), table)[0, 3]
        )
        for n in (6, 7, 8, 9)
    ]
    assert seen == [-np.inf, -np.inf, 5, 5]


def test_ids_outside_the_vocabulary_are_ignored():
    table = empty_table()
    table.ids[0, :3], table.values[0, :3], table.until[0, :3] = [-1, 8, 2**30], 9, FOREVER
    history = np.array([[-1, 8, 2**30, 2]], np.int32)
    logits = np.ones((1, 8), np.float32)
    rows = make_rows(1, num_bias=3, repetition_penalty=2.0, prompt_len=2, kv_len=4)
    got = run(logits, rows, history, table)
    np.testing.assert_array_equal(got[0], [1, 1, 0.5, 1, 1, 1, 1, 1])


def test_masks_leave_what_they_allow():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4, 70)).astype(np.float32)
    allowed = rng.random((4, 70)) < 0.3
    allowed[3, [31, 32, 63, 64, 69]] = True  # where words begin and end
    rows = make_rows(4, masked=[True, False, True, True])
    got = run(logits, rows, no_history(), empty_table(), as_masks(allowed))
    want = np.where(allowed, logits, -np.inf)
    want[1] = logits[1]
    np.testing.assert_array_equal(got, want)
