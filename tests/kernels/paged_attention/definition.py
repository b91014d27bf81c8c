"""A backend of paged attention beside the definition, in float64 and without pages."""

from __future__ import annotations

from itertools import pairwise

import jax.numpy as jnp
import numpy as np
from attention_cases import Sequences

from llmjax_kernels.layout import PagedKV, make_ragged_batch

MIXED = [(0, 35), (37, 17), (75, 1), (0, 1), (0, 0), (64, 2), (0, 0)]
"""Whole prompts, chunks, decodes and padding in one step: tokens before it, tokens in it."""
DECODES = [(0, 1), (15, 1), (16, 1), (300, 1), (0, 0)]
"""A token each, where row t is sequence t."""
PADDING = 5
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Of the greatest result of a row; that of queries or of floats in pages, whichever is more."""
STEPS = {"int8": 1.01 / 127, "fp8_e4m3": 2.0**-3, "fp8_e5m2": 2.0**-2}
"""What two neighbours of a format are apart at most, of the greatest of their row."""


def check(backend, case, runs, dtype, *, decode_only=False, tokens=None, sinks=False, seed=1):
    """The results, and the pages afterwards; these are NaN wherever no sequence has been."""
    rng = np.random.default_rng(seed)
    sequences = Sequences(case, runs, rng)
    starts, kv_lens, tables = (jnp.asarray(x) for x in sequences.batch)
    T = len(runs) if decode_only else tokens or int(starts[-1]) + PADDING
    q, k, v = (
        jnp.asarray(rng.standard_normal((T, heads, case.head_dim)), dtype)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    batch = make_ragged_batch(starts, kv_lens, tables, T, decode_only=decode_only)
    pages = [poisoned(sequences, values) for values in (sequences.k, sequences.v)]
    kv = PagedKV(*map(jnp.asarray, pages), case.format)
    # As large as scores, some that outweigh all keys and some that none feels.
    sink = rng.uniform(-4, 6, case.heads).astype(np.float32) if sinks else None
    out, new = backend(q, k, v, kv, batch, case.spec, None if sink is None else jnp.asarray(sink))

    assert out.dtype == q.dtype
    kept = []
    for before, after, rows in zip(pages, (new.k, new.v), (k, v), strict=True):
        kept.append(decoded(after, case))
        untouched = ~sequences.written
        np.testing.assert_array_equal(kept[-1][untouched], decoded(before, case)[untouched])
        check_rows(kept[-1], sequences, np.asarray(rows, np.float32))
    result = np.asarray(out, np.float32)
    # Weights of float16 times scales are bfloat16, which has their range.
    kept_as = "bfloat16" if case.format.is_scaled and dtype == "float16" else case.kv_dtype
    tolerance = max(TOLERANCE[name] for name in (dtype, kept_as) if name in TOLERANCE)
    assert np.isfinite(result).all()  # padding, too
    for s, (start, stop) in enumerate(pairwise(sequences.starts)):
        expected = attention(np.asarray(q[start:stop], np.float64), s, *kept, sequences, sink)
        error = np.abs(result[start:stop] - expected)
        assert (error <= tolerance * np.abs(expected).max(-1, keepdims=True)).all()


def poisoned(sequences, values):
    encoded = np.array(sequences.case.format.encode(jnp.asarray(values, jnp.float32)))
    encoded.view(np.uint8)[~sequences.before] = 255
    return encoded


def decoded(pages, case):
    return np.asarray(case.format.decode(jnp.asarray(pages), jnp.float32), np.float64)


def check_rows(kept, sequences, rows):
    """What was written is what came in, up to a step of the format."""
    case = sequences.case
    for s, (start, stop) in enumerate(pairwise(sequences.starts)):
        length = sequences.kv_lens[s]
        found = of_sequence(kept, s, sequences)[length - (stop - start) :]
        expected = rows[start:stop]
        largest = np.abs(expected).max(-1, keepdims=True, initial=0)
        step = STEPS.get(case.kv_dtype, 2.0**-8 if case.kv_dtype == "bfloat16" else 2.0**-11)
        assert (np.abs(found - expected) <= step * largest).all()


def of_sequence(pages, s, sequences):
    """[positions, K, H] of one sequence."""
    position, size = np.arange(sequences.kv_lens[s]), sequences.case.page_size
    return pages[sequences.tables[s, position // size], position % size]


def attention(q, s, k_pages, v_pages, sequences, sinks):
    """Of the last queries of sequence s, one head after the other."""
    case, out = sequences.case, np.zeros(q.shape)
    keys, values = (of_sequence(pages, s, sequences) for pages in (k_pages, v_pages))
    key = np.arange(len(keys))
    distance = len(keys) - len(q) + np.arange(len(q))[:, None] - key
    seen = (distance >= 0) & (distance < (case.window or len(keys)))
    for head in range(case.heads):
        of_group = head // (case.heads // case.kv_heads)
        scores = case.spec.scale * q[:, head] @ keys[:, of_group].T
        if case.softcap is not None:
            scores = case.softcap * np.tanh(scores / case.softcap)
        weights = np.where(seen, np.exp(scores), 0)
        sink = 0 if sinks is None else np.exp(np.float64(sinks[head]))
        out[:, head] = weights @ values[:, of_group] / (weights.sum(-1, keepdims=True) + sink)
    return out
