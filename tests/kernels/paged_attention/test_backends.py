"""XLA and Triton against the definition of paged attention; Mosaic GPU is in test_hopper.py."""

from __future__ import annotations

import jax
import pytest
from attention_cases import Case
from definition import DECODES, MIXED, check
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_backend import triton_backend

from llmjax_kernels.paged_attention import AttentionArgs, jax_triton, reference

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


@pytest.fixture(params=["XLA", "Triton"])
def backend(request, monkeypatch):
    """(args) -> (out, pages)."""
    if request.param == "XLA":

        def run(*args):
            return reference.run(AttentionArgs(*args))

        fast = {"xla_backend_optimization_level": 0}  # to compile
        return jax.jit(run, static_argnums=5, compiler_options=fast)
    return triton_backend(monkeypatch, jax_triton, AttentionArgs)


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
