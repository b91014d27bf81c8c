"""Whatever a batch says, nothing outside its arrays is read or written.

`make sanitize` runs this with the library built so that the first such access ends it.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from attention_cases import EPS, Case, Sequences, from_native, layer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from random_weights import random_rows

from llmjax_kernels.native.blocks import Projection, Residual, linear, mlp_block

ROWS, S, P = 96, 4, 6
CASES = {
    "float32": Case(heads=3, kv_heads=1, page_size=128),
    "bfloat16, window, pages of 32": Case(kv_dtype="bfloat16", window=20, page_size=32),
    "quantised": Case(width=256, formats=("Q4_K", "Q8_0", "Q5_1", "Q4_1"), head_dim=16, rotary=6),
    "in order": Case(
        width=64,
        formats=("4 bits in order", "8 bits in order", "8 bits with minima", "e2m1 by 16"),
    ),
}
anywhere = st.one_of(
    st.integers(-2, 130), st.sampled_from([-(2**31), 2**31 - 1, 2**31 - 16, -(2**31) + 16])
)


@pytest.mark.every_isa
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_sequences(name, data):
    """What lies behind a sequence's pages in the block tables is nothing to go by."""
    case, layer = CASES[name], layer_of(CASES[name])
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    count = st.sampled_from([0, 1, 1, 2, 15, 16, 17, 24])
    most = P * case.page_size - 24
    runs = data.draw(st.lists(st.tuples(st.integers(0, most), count), min_size=S, max_size=S))
    sequences = Sequences(case, runs, rng)
    starts, kv_lens, owned = sequences.batch
    tables = np.full((S, P), data.draw(anywhere), np.int32)
    for row, mine, pages in zip(tables, owned, -(-kv_lens // case.page_size), strict=True):
        row[:pages] = mine[:pages]
    x = rng.standard_normal((ROWS, case.width)).astype(np.float32)
    pages = pad_pages(sequences)
    out, kv = layer.native(x, pages, starts, kv_lens, tables)
    assert np.isfinite(out).all()
    assert not np.asarray(out)[starts[-1] :].any()
    k, v = from_native(kv)
    unowned = ~(sequences.before | sequences.written)
    for values in (k, v):
        assert np.isnan(values[:, : sequences.num_pages][:, unowned]).all()


def pad_pages(sequences: Sequences):
    """As many pages for any sequences, so that there is one program; more NaN behind them."""

    def pad(x: np.ndarray) -> np.ndarray:
        more = (len(x), S * P + 3 - x.shape[1], *x.shape[2:-1], x.shape[-1] * x.itemsize)
        return np.concatenate([x, np.full(more, 0xFF, np.uint8).view(x.dtype)], 1)

    return jax.tree.map(pad, sequences.native_pages)


def fault(starts, kv_lens, tables, page_size: int, num_pages: int) -> str | None:
    """What is wrong with a batch, as the kernels should find."""
    if starts[0] != 0 or starts[-1] > ROWS:
        return "query_starts lie outside the rows"
    for s in range(S):
        queries = int(starts[s + 1]) - int(starts[s])
        if queries < 0:
            return "query_starts fall"
        if queries == 0:
            continue
        if kv_lens[s] < queries:
            return "a sequence is shorter than its queries"
        if kv_lens[s] > P * page_size:
            return "a sequence is longer than its pages"
        ids = tables[s, : -(-int(kv_lens[s]) // page_size)]
        if ((ids < 0) | (ids >= num_pages)).any():
            return "a page id lies outside the pool"
    return None


@pytest.mark.every_isa
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_senseless_batch_is_refused(name, data):
    case, layer = CASES[name], layer_of(CASES[name])
    sensible = Sequences(case, [(30, 2), (0, 17), (80, 1), (0, 0)], np.random.default_rng(0))
    starts, kv_lens = sensible.starts.copy(), sensible.kv_lens.copy()
    tables = np.zeros((S, P), np.int32)
    tables[:, : sensible.tables.shape[1]] = sensible.tables
    arrays = (starts, kv_lens, tables.reshape(-1))
    places = st.tuples(st.sampled_from(arrays), st.integers(0, S * P - 1), anywhere)
    for array, place, value in data.draw(st.lists(places, min_size=1, max_size=3)):
        array[place % len(array)] = value
    x = np.ones((ROWS, case.width), np.float32)
    pages = pad_pages(sensible)
    reason = fault(starts, kv_lens, tables, case.page_size, pages.k.shape[1])
    if reason is None:
        jax.block_until_ready(layer.native(x, pages, starts, kv_lens, tables))
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        jax.block_until_ready(layer.native(x, pages, starts, kv_lens, tables))


@pytest.mark.parametrize("rows", [-(2**31), -1, 4, 2**31 - 1])
def test_more_rows_than_there_are_is_refused(rows):
    weight = Projection(random_rows("Q4_0", 64, 64, np.random.default_rng(0)).pack())
    x, rows = np.ones((3, 64), np.float32), np.array([rows], np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="num_rows lies outside the rows"):
        linear(x, weight, rows).block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="num_tokens lies outside the rows"):
        out = mlp_block(x, None, weight, weight, weight, "silu", Residual(), EPS, rows)
        out.block_until_ready()


def test_heads_that_do_not_divide_are_refused():
    """Some would be written by nobody."""
    case = replace(CASES[min(CASES)], heads=6, kv_heads=4)
    layer = layer_of(case)
    few = Sequences(case, [(0, 3)], np.random.default_rng(0))
    x = np.ones((3, case.width), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no multiple of the key heads"):
        layer.native(x, few.native_pages, few.starts, few.kv_lens, few.tables)
