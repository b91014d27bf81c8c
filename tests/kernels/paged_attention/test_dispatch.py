"""Which backend computes attention, and how its work is cut."""

from __future__ import annotations

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax_kernels import triton_call
from llmjax_kernels.gpu import Gpu, compiling_for, target
from llmjax_kernels.kv_format import KV_FORMATS
from llmjax_kernels.layout import PagedKV, RaggedBatch
from llmjax_kernels.paged_attention import (
    AttentionArgs,
    AttentionSpec,
    jax_triton,
    mosaic_gpu,
    serving,
    shapes,
)

A100, H100, BLACKWELL, OLD = Gpu(80, 108), Gpu(90, 132), Gpu(100, 148), Gpu(75, 72)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(triton_call, "installed", lambda: True)
    monkeypatch.delenv("LLMJAX_KERNELS", raising=False)


@pytest.fixture
def hopper(installed, monkeypatch):
    """A jax whose Mosaic GPU is trusted."""
    monkeypatch.setattr(jax, "__version_info__", mosaic_gpu.OLDEST_JAX)


def arguments(T=8, S=8, N=8, K=2, H=64, dtype="bfloat16", kv="bfloat16", P=64, page_size=16):
    def shape(*dims, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(dims, dtype)

    format = KV_FORMATS[kv]
    pages = shape(100, page_size, K, format.width(H), dtype=format.storage)
    rows = (shape(T), shape(T), shape(T), shape(S + 1), shape(S), shape(S, P))
    batch = RaggedBatch(*rows, decode_only=T == S)
    q, k = shape(T, N, H, dtype=dtype), shape(T, K, H, dtype=dtype)
    return AttentionArgs(q, k, k, PagedKV(pages, pages, format), batch, AttentionSpec(1.0))


def test_there_is_no_gpu_to_compile_for_but_the_one_that_is_named():
    assert target() is None
    with compiling_for(H100):
        assert target() == H100
        with compiling_for(A100):
            assert target() == A100
        assert target() == H100
    assert target() is None


def test_triton_serves_on_gpus_from_a100_on(installed, monkeypatch):
    assert not jax_triton.supports(arguments())
    assert serving() == "XLA"
    for gpu, ok in ((A100, True), (H100, True), (OLD, False)):
        with compiling_for(gpu):
            assert jax_triton.supports(arguments()) is ok
    monkeypatch.setenv("LLMJAX_KERNELS", "xla")
    with compiling_for(H100):
        assert not jax_triton.supports(arguments())
        assert serving() == "XLA"
    monkeypatch.delenv("LLMJAX_KERNELS")
    with compiling_for(A100):
        assert serving() == "Triton attention, XLA"


def test_mosaic_gpu_serves_on_hopper(hopper, monkeypatch):
    for gpu, ok in ((A100, False), (BLACKWELL, False)):
        with compiling_for(gpu):
            assert mosaic_gpu.supports(arguments()) is ok
    with compiling_for(H100):
        assert mosaic_gpu.supports(arguments())
        assert serving() == "Mosaic GPU and Triton attention, XLA"
        for value in ("triton", "xla"):
            monkeypatch.setenv("LLMJAX_KERNELS", value)
            assert not mosaic_gpu.supports(arguments())
            assert jax_triton.supports(arguments()) is (value == "triton")


def test_an_older_jax_is_served_by_triton(hopper, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with compiling_for(H100):
        assert not mosaic_gpu.supports(arguments())
        assert jax_triton.supports(arguments())


@pytest.mark.parametrize(
    "different",
    [
        {"T": 64},  # prompts
        {"H": 80},
        {"dtype": "float32", "kv": "float32"},
        {"kv": "float16"},
        {"kv": "int8"},
        {"page_size": 4},
        {"page_size": 24},
        {"page_size": 96},
        {"N": 130, "K": 2},  # heads of a group
    ],
    ids=str,
)
def test_what_mosaic_gpu_does_not_support_is_left_to_triton(hopper, different):
    with compiling_for(H100):
        assert not mosaic_gpu.supports(arguments(**different))
        assert jax_triton.supports(arguments(**different))


def test_mosaic_gpu_takes_pages_and_groups_of_many_sizes(hopper):
    with compiling_for(H100):
        for page_size in (8, 16, 32, 64, 128, 192):
            assert mosaic_gpu.supports(arguments(page_size=page_size))
        for group in (1, 7, 64):
            assert mosaic_gpu.supports(arguments(N=2 * group, dtype="float16", kv="float16"))


def test_mosaic_gpu_takes_prompts_where_it_is_asked_to(hopper, monkeypatch):
    prompts = {"T": 2048, "S": 16, "N": 32, "K": 8, "H": 128}
    with compiling_for(H100):
        assert not mosaic_gpu.supports(arguments(**prompts))
        monkeypatch.setenv("LLMJAX_KERNELS", "mosaic")
        assert mosaic_gpu.supports(arguments())
        for different in ({}, {"H": 64}, {"N": 16}, {"N": 128}, {"page_size": 256}):
            assert mosaic_gpu.supports(arguments(**prompts | different))
        for different in (
            {"T": 512},  # too few tiles for the chip
            {"H": 256},
            {"N": 136},  # heads of a group
            {"kv": "int8"},
            {"kv": "float16"},
            {"page_size": 4},
            {"page_size": 192},
        ):
            args = arguments(**prompts | different)
            assert not mosaic_gpu.supports(args)
            assert jax_triton.supports(args)
        negative = arguments(**prompts)._replace(spec=AttentionSpec(-1.0))
        assert not mosaic_gpu.supports(negative)


def test_two_programs_of_mosaic_gpu_fit_a_multiprocessor():
    assert [mosaic_gpu.choose_stages(head_dim) for head_dim in mosaic_gpu.HEAD_DIMS] == [4, 2, 2]
    prompts = [mosaic_gpu.choose_prompt_stages(H) for H in mosaic_gpu.PROMPT_HEAD_DIMS]
    assert prompts == [4, 2]  # one program, that is


def test_what_triton_does_not_support_is_left_to_xla(installed):
    with compiling_for(H100):
        assert jax_triton.supports(arguments(H=256))
        assert not jax_triton.supports(arguments(H=264))  # beyond a program's registers
        assert jax_triton.supports(arguments(H=20, kv="int8"))
        assert not jax_triton.supports(arguments(H=18, kv="int8"))  # its scales lie askew
        assert jax_triton.supports(arguments(H=18))
        assert not jax_triton.supports(arguments(T=2**20, N=64))  # 2^32 elements


def test_a_missing_installation_is_said_once(monkeypatch, caplog):
    monkeypatch.delenv("LLMJAX_KERNELS", raising=False)
    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: None)
    triton_call.installed.cache_clear()
    with compiling_for(H100), caplog.at_level(logging.WARNING):
        assert not jax_triton.supports(arguments())
        assert not jax_triton.supports(arguments())
    triton_call.installed.cache_clear()
    [record] = caplog.records
    assert "jax_triton and triton not installed (the extra `gpu`)" in record.getMessage()


@given(
    T=st.integers(1, 4096),
    S=st.integers(1, 256),
    K=st.sampled_from([1, 2, 8, 32]),
    group=st.integers(1, 71),
    H=st.integers(1, 256),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    kv=st.sampled_from(list(KV_FORMATS)),
    gpu=st.sampled_from([A100, H100]),
)
def test_a_shape_covers_its_work(T, S, K, group, H, dtype, kv, gpu):
    args = arguments(T, S, K * group, K, H, dtype, kv)
    shape = shapes.choose_shape(args, gpu)
    assert shape.rows & (shape.rows - 1) == 0 and 16 <= shape.rows <= 128
    assert 1 <= shape.tile <= shape.rows // group
    assert shape.keys & (shape.keys - 1) == 0 and shape.keys >= 16  # what a matrix unit takes
    assert 1 <= shape.splits <= shapes.MOST_SPLITS
    if args.batch.decode_only:
        assert shape.tile == 1
    for other in shapes.candidates(args, shape):  # what is timed
        assert 1 <= other.tile <= other.rows // group
        assert other.tile == 1 or not args.batch.decode_only
        assert 1 <= other.splits <= shapes.most_splits(args)


def test_a_lone_sequence_fills_the_chip_and_a_crowd_is_not_split():
    def splits(T, S, **options):
        return shapes.choose_shape(arguments(T, S, N=32, K=8, H=128, **options), H100).splits

    assert 8 * splits(1, 1, P=512) >= 3 * H100.multiprocessors
    assert splits(1, 1, P=4) == 1  # 64 tokens at most
    assert splits(256, 256, P=512) == 1
    assert splits(2048, 8, P=512) == 1
    longer = arguments(1, 1, P=512)
    wider = longer._replace(batch=replace(longer.batch, decode_only=False))
    assert shapes.choose_shape(wider, H100).splits > 1
