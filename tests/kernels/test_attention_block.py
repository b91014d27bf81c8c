"""The attention block against the reference, and a sequence against itself in pieces."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from attention_cases import LAYER, LAYERS, Case, Layer, Sequences, from_native, layer_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmjax_kernels.native import blocks

MIXED = [(0, 70), (37, 21), (99, 1), (0, 1), (0, 0), (64, 32), (0, 0)]
"""Whole prompts, chunks, decodes and padding in one step."""
PADDING = 5
CASES = {
    "gqa 2": Case(),
    "no gqa, head 16": Case(heads=1, kv_heads=1, head_dim=16, rotary=16),
    "gqa 3, head 64": Case(heads=9, kv_heads=3, head_dim=64, rotary=64),
    "gqa 4, head 48, odd width": Case(heads=4, kv_heads=1, head_dim=48, rotary=20, width=37),
    "gqa 8, no rotation": Case(heads=8, kv_heads=1, rotary=0, norm=False),
    "head 128, pages of 32": Case(heads=2, kv_heads=1, head_dim=128, rotary=128, page_size=32),
    "head 256, window": Case(heads=2, kv_heads=1, head_dim=256, rotary=256, window=33),
    "head 512": Case(heads=1, kv_heads=1, head_dim=512, rotary=12),
    "window of one": Case(window=1),
    "window, softcap, pages of 32": Case(window=70, softcap=1.5, page_size=32),
    "softcap": Case(softcap=0.7, heads=6),
    "biases": Case(bias=True, residual_scale=0.22),
    "norms of heads": Case(qk_norm="head", post_norm=True, width=33),
    "norms of all": Case(qk_norm="full", norm=False, post_norm=True, residual_scale=0.5),
    "bfloat16": Case(kv_dtype="bfloat16", heads=9, kv_heads=3, head_dim=64, rotary=64),
    "bfloat16, window, 32": Case(kv_dtype="bfloat16", window=20, page_size=32, head_dim=80),
    "pages of 48": Case(page_size=48, kv_dtype="bfloat16"),
    "int8": Case(kv_dtype="int8", heads=9, kv_heads=3, head_dim=64, rotary=64),
    "int8, window, softcap, 32": Case(kv_dtype="int8", window=20, softcap=1.0, page_size=32),
    "e4m3": Case(kv_dtype="fp8_e4m3", head_dim=80),
    "e5m2, pages of 48": Case(kv_dtype="fp8_e5m2", page_size=48),
}


EVERY_ISA = (
    *("gqa 3, head 64", "window, softcap, pages of 32", "norms of heads", "bfloat16"),
    *("int8", "e4m3", "e5m2, pages of 48"),
)
marks = {name: [pytest.mark.every_isa] if name in EVERY_ISA else [] for name in CASES}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=marks[name]) for name, case in CASES.items()]
)
def test_agrees_with_the_reference(case):
    rng = np.random.default_rng(1)
    layer, sequences = Layer(case), Sequences(case, MIXED, rng)
    tokens = sequences.starts[-1]
    x = rng.standard_normal((tokens + PADDING, case.width)).astype(np.float32)
    expected, kv = layer.reference(x, sequences.reference_pages, *sequences.batch)
    native_pages = sequences.native_pages
    before = from_native(native_pages)
    found, native_kv = layer.native(x, native_pages, *sequences.batch)

    # A key may be rounded the other way, by the last bit of what it is kept in.
    step = STEPS[case.kv_dtype]
    tolerance = max(step / 4, 2e-5)
    np.testing.assert_allclose(found[:tokens], expected[:tokens], tolerance, tolerance)
    assert not np.asarray(found[tokens:]).any()
    for pages, new, old in zip((kv.k, kv.v), from_native(native_kv), before, strict=True):
        wrote = sequences.written
        found_rows, rows = new[LAYER, wrote], np.asarray(pages)[wrote]
        largest = np.abs(rows).max(-1, keepdims=True)
        assert (abs(found_rows - rows) <= step * largest + 2e-5).all()
        untouched = np.ones(new.shape[:3], bool)
        untouched[LAYER] = ~wrote
        np.testing.assert_array_equal(new[untouched], old[untouched])


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "formats",
    [
        ("Q4_K", "Q6_K", "float32", "Q4_1"),
        # Each has its inputs in an order of its own, or in none.
        ("4 bits in order", "8 bits in order", "8 bits", "4 bits with minima in order"),
        ("8 bits in order", "float32", "4 bits in order", "float32"),
    ],
)
def test_takes_quantised_and_float_weights_together(formats, kv_dtype):
    case = Case(width=256, kv_dtype=kv_dtype, formats=formats)
    rng = np.random.default_rng(1)
    layer, sequences = Layer(case), Sequences(case, MIXED, rng)
    tokens = sequences.starts[-1]
    x = rng.standard_normal((tokens, case.width)).astype(np.float32)
    expected, _ = layer.reference(x, sequences.reference_pages, *sequences.batch)
    found, _ = layer.native(x, sequences.native_pages, *sequences.batch)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected - x)
    assert error < 0.02  # of 8-bit activations


STEPS = {
    "float32": 2e-5,
    "bfloat16": 2.0**-7,
    "int8": 1.01 / 127,
    "fp8_e4m3": 2.0**-3,
    "fp8_e5m2": 2.0**-2,
}
"""What two neighbours of a format are apart at most, of the greatest of their row."""
LONG = {
    "float32": Case(heads=3, kv_heads=1),
    "long window": Case(window=900, softcap=2.0),
    "int8": Case(kv_dtype="int8", heads=6),
    "short window, bfloat16": Case(window=40, kv_dtype="bfloat16", page_size=32),
}


@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
def test_a_long_context_is_shared_by_threads(case, set_threads):
    """Bit for bit the same as on one, and as among other sequences."""
    layer = Layer(case)
    for before in (511, 512, 1600):
        sequences = Sequences(case, [(before, 1)], np.random.default_rng(1))
        x = np.random.default_rng(2).standard_normal((3, case.width)).astype(np.float32)
        expected, _ = layer.reference(x, sequences.reference_pages, *sequences.batch)
        set_threads(1)
        alone, _ = layer.native(x, sequences.native_pages, *sequences.batch)
        tolerance = max(STEPS[case.kv_dtype] / 4, 2e-5)
        np.testing.assert_allclose(alone[0], expected[0], tolerance, tolerance)
        for threads in (2, 3, 8):
            set_threads(threads)
            shared, _ = layer.native(x, sequences.native_pages, *sequences.batch)
            np.testing.assert_array_equal(shared, alone)
        _, kv_lens, tables = sequences.batch
        crowd = (np.arange(4, dtype=np.int32), np.repeat(kv_lens, 3), np.repeat(tables, 3, 0))
        same = np.repeat(x[:1], 3, 0)
        among, _ = layer.native(same, sequences.native_pages, *crowd)
        np.testing.assert_array_equal(among, np.repeat(alone[:1], 3, 0))


INVARIANT = {
    "quantised, window": Case(
        heads=4, formats=("Q4_1", "Q8_0", "Q5_0", "Q6_K"), width=64, head_dim=64, window=50
    ),
    "float, bfloat16 pages": Case(heads=4, kv_heads=1, kv_dtype="bfloat16", page_size=32),
    "int8 pages": Case(heads=4, kv_dtype="int8", window=90),
    "softcap": Case(softcap=2.0, qk_norm="head", post_norm=True),
}
LENGTH, TOKENS, OTHERS = 150, 320, 2


@pytest.mark.every_isa
@pytest.mark.parametrize("name", INVARIANT)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it only puts threads back
)
@given(data=st.data())
def test_a_row_is_the_same_in_any_chunk_and_company(set_threads, name, data):
    case, layer = INVARIANT[name], layer_of(INVARIANT[name])
    x = np.random.default_rng(2).standard_normal((LENGTH, case.width)).astype(np.float32)
    set_threads(1)
    expected, expected_kv = in_chunks(layer, x, [LENGTH], [[(0, 0)] * OTHERS])

    set_threads(data.draw(st.integers(1, 3), "threads"))
    cuts = data.draw(st.sets(st.integers(1, LENGTH - 1), max_size=6), "cuts")
    edges = [0, *sorted(cuts), LENGTH]
    counts = [stop - start for start, stop in pairwise(edges)]
    run = st.tuples(st.integers(0, 70), st.sampled_from([0, 1, 1, 17, 64, 80]))
    company = st.lists(run, min_size=OTHERS, max_size=OTHERS)
    others = [data.draw(company, "others") for _ in counts]
    found, found_kv = in_chunks(layer, x, counts, others)
    np.testing.assert_array_equal(found, expected)
    for ours, theirs in zip(found_kv, expected_kv, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def in_chunks(
    layer: Layer, x: np.ndarray, counts: list[int], others: list[list[tuple[int, int]]]
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """The outputs of a sequence computed in chunks, between other sequences; its keys, values."""
    case, rng = layer.case, np.random.default_rng(3)
    P = -(-LENGTH // case.page_size)
    num_pages = (1 + OTHERS) * P
    size = (num_pages, case.page_size, case.kv_heads, case.head_dim)
    kv = blocks.make_pages(LAYERS, *size, case.format)
    tables = rng.permutation(num_pages).reshape(-1, P).astype(np.int32)
    outputs, done = [], 0
    for count, (first, *rest) in zip(counts, others, strict=True):
        runs = [first, (done, count), *rest]
        starts = np.cumsum([0, *(n for _, n in runs)]).astype(np.int32)
        kv_lens = np.array([sum(run) if run[1] else 0 for run in runs], np.int32)
        rows = rng.standard_normal((TOKENS, case.width)).astype(np.float32)
        own = slice(starts[1], starts[2])
        rows[own] = x[done : done + count]
        out, kv = layer.native(rows, kv, starts, kv_lens, tables)
        outputs.append(np.asarray(out)[own])
        done += count
    position = np.arange(LENGTH)
    place = (tables[1, position // case.page_size], position % case.page_size)
    k, v = from_native(kv)
    return np.concatenate(outputs), (k[LAYER][place], v[LAYER][place])
