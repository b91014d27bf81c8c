"""Every backend of paged attention against the definition, in float64 and without pages."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Sequences
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_backend import GPU, triton_backend

from llmjax_kernels.gpu import compiling_for
from llmjax_kernels.layout import PagedKV, make_ragged_batch
from llmjax_kernels.paged_attention import AttentionArgs, jax_triton, mosaic_gpu, reference

MIXED = [(0, 35), (37, 17), (75, 1), (0, 1), (0, 0), (64, 2), (0, 0)]
"""Whole prompts, chunks, decodes and padding in one step: tokens before it, tokens in it."""
DECODES = [(0, 1), (15, 1), (16, 1), (300, 1), (0, 0)]
"""A token each, where row t is sequence t."""
PADDING = 5
CASES = {
    "gqa 2": Case(),
    "no gqa, head 16": Case(heads=1, kv_heads=1, head_dim=16),
    "gqa 3, head 64": Case(heads=9, kv_heads=3, head_dim=64),
    "gqa 7": Case(heads=14, kv_heads=2, head_dim=64),
    "gqa 17, head 20": Case(heads=17, kv_heads=1, head_dim=20),
    "head 80, 5 kv heads": Case(heads=5, kv_heads=5, head_dim=80),
    "head 96": Case(heads=4, kv_heads=1, head_dim=96),
    "head 128, pages of 32": Case(heads=2, kv_heads=1, head_dim=128, page_size=32),
    "head 256, window": Case(heads=2, kv_heads=1, head_dim=256, window=33),
    "pages of one": Case(page_size=1),
    "pages of 256": Case(page_size=256),
    "window of one": Case(window=1),
    "window, softcap": Case(window=70, softcap=1.5, page_size=32),
    "softcap": Case(softcap=50.0, heads=6),
    "bfloat16 pages": Case(kv_dtype="bfloat16"),
    "float16 pages": Case(kv_dtype="float16", head_dim=80),
    "int8": Case(kv_dtype="int8", heads=9, kv_heads=3, head_dim=64),
    "int8, window, softcap": Case(kv_dtype="int8", window=20, softcap=1.0, page_size=32),
    "e4m3": Case(kv_dtype="fp8_e4m3", head_dim=80),
    "e5m2, pages of 64": Case(kv_dtype="fp8_e5m2", page_size=64),
}
HOPPER_CASES = {
    "gqa 3, head 64": Case(heads=6, kv_heads=2, head_dim=64, kv_dtype="bfloat16"),
    "head 128, window, pages of 8": Case(
        heads=2, kv_heads=1, head_dim=128, page_size=8, window=70, kv_dtype="bfloat16"
    ),
    "head 128, float16, pages of 128": Case(
        heads=8, kv_heads=1, head_dim=128, page_size=128, kv_dtype="float16"
    ),
    "head 256, softcap": Case(heads=2, kv_heads=1, head_dim=256, softcap=1.5, kv_dtype="bfloat16"),
}
"""What Mosaic GPU's kernel takes."""
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Of the greatest result of a row; that of queries or of floats in pages, whichever is more."""
STEPS = {"int8": 1.01 / 127, "fp8_e4m3": 2.0**-3, "fp8_e5m2": 2.0**-2}
"""What two neighbours of a format are apart at most, of the greatest of their row."""


@pytest.fixture(params=["XLA", "Triton"])
def backend(request, monkeypatch):
    """(args) -> (out, pages)."""
    if request.param == "XLA":

        def run(*args):
            return reference.run(AttentionArgs(*args))

        fast = {"xla_backend_optimization_level": 0}  # to compile
        return jax.jit(run, static_argnums=5, compiler_options=fast)
    return triton_backend(monkeypatch, jax_triton, AttentionArgs)


def mosaic_backend(monkeypatch):
    """Between Triton's kernels, in its interpreter, Mosaic GPU's in its own."""
    triton_backend(monkeypatch, jax_triton, AttentionArgs)
    if jax.__version_info__ < mosaic_gpu.OLDEST_JAX:
        pytest.skip("Mosaic GPU's interpreter is not complete in this version of jax")
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def run(*args):
        with compiling_for(GPU), plgpu.force_gpu_interpret_mode():
            assert mosaic_gpu.supports(AttentionArgs(*args))
            return mosaic_gpu.run(AttentionArgs(*args))

    return run


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prompts_chunks_and_decodes_in_one_step(backend, case):
    check(backend, case, MIXED, "float32")


@pytest.mark.parametrize(
    "name", ["gqa 7", "head 80, 5 kv heads", "pages of one", "window, softcap", "int8", "e4m3"]
)
def test_decodes(backend, name):
    check(backend, CASES[name], DECODES, "float32", decode_only=True)


@pytest.mark.parametrize("name", ["gqa 3, head 64", "bfloat16 pages", "int8"])
def test_takes_bfloat16(backend, name):
    check(backend, CASES[name], MIXED, "bfloat16")
    check(backend, CASES[name], DECODES, "bfloat16", decode_only=True)


def test_takes_float16(backend):
    check(backend, Case(kv_dtype="float16"), MIXED, "float16")
    check(backend, Case(kv_dtype="fp8_e5m2", head_dim=64), DECODES, "float16", decode_only=True)


@pytest.mark.parametrize("name", ["gqa 3, head 64", "window, softcap", "int8"])
def test_sinks(backend, name):
    check(backend, CASES[name], MIXED, "float32", sinks=True)
    check(backend, CASES[name], DECODES, "float32", decode_only=True, sinks=True)


@pytest.mark.parametrize("case", HOPPER_CASES.values(), ids=HOPPER_CASES)
def test_decodes_on_hopper(monkeypatch, case):
    backend = mosaic_backend(monkeypatch)
    check(backend, case, DECODES, case.kv_dtype, decode_only=True, sinks=case.softcap is None)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_hopper_waits_for_what_it_reads(monkeypatch, head_dim):
    assert not is_out_of_step(monkeypatch, head_dim)


def test_not_waiting_is_seen(monkeypatch):
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    assert is_out_of_step(monkeypatch, 64)


def is_out_of_step(monkeypatch, head_dim):
    """Whether Mosaic's interpreter finds a race, or a barrier that nobody waits for: one sequence
    of four blocks, the last not full."""
    mosaic_backend(monkeypatch)  # or it skips
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from llmjax_kernels.paged_attention import mosaic_kernels as kernels

    q = jnp.ones((1, 1, 3, head_dim), jnp.bfloat16)
    pages = jnp.ones((8, 32, 1, head_dim), jnp.bfloat16)
    lens, tables = jnp.full(1, 200, jnp.int32), jnp.arange(8, dtype=jnp.int32)[None]
    arithmetic, cut = kernels.Arithmetic(0.1, 0.0, 0), kernels.Cut(splits=1, stages=2, least=1)
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            attend = kernels.attend.__wrapped__  # not as an earlier test has traced it
            result = attend(q, pages, pages, lens, tables, arithmetic, cut)
            jax.block_until_ready(result)
    except jax.errors.JaxRuntimeError as error:
        said = ("RACE DETECTED", "no threads observed", "had only observed")
        assert any(message in str(error) for message in said)
        interpreter.reset_gpu_interpret_mode_state()
        return True
    return interpreter.get_races().races_found


RUN = st.tuples(st.integers(0, 150), st.sampled_from([0, 1, 1, 2, 17, 30]))


@settings(max_examples=4, deadline=None)
@given(
    runs=st.lists(RUN, min_size=5, max_size=5).filter(lambda runs: any(n for _, n in runs)),
    group=st.integers(1, 5),
    page_size=st.sampled_from([1, 8, 16, 64]),
    window=st.none() | st.integers(1, 200),
    seed=st.integers(0, 9),
)
def test_any_batch(runs, group, page_size, window, seed):
    case = Case(heads=2 * group, head_dim=24, page_size=page_size, window=window)
    with pytest.MonkeyPatch.context() as patch:
        check(
            triton_backend(patch, jax_triton, AttentionArgs),
            case,
            runs,
            "float32",
            tokens=155,
            seed=seed,
        )


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
