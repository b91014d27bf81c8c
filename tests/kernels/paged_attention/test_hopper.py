"""Mosaic GPU's kernels for Hopper against the definition of paged attention, interpreted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case
from definition import DECODES, check
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_backend import GPU, triton_backend

from llmjax_kernels.gpu import Gpu, compiling_for
from llmjax_kernels.layout import make_ragged_batch
from llmjax_kernels.paged_attention import AttentionArgs, jax_triton, mosaic_gpu
from llmjax_kernels.paged_attention.tiles import cut_into_tiles

SMALL = Gpu(compute_capability=90, multiprocessors=1)
"""A Hopper that few tiles keep busy."""
PROMPTS = [(0, 35), (290, 90), (75, 1), (0, 1), (0, 0), (600, 20), (0, 0)]
"""As `MIXED`, with more blocks of keys than there are in shared memory."""
TOKENS = 152
"""Of `PROMPTS` and padding: a multiple of 8, as buckets are."""
DECODE_CASES = {
    "gqa 3, head 64": Case(heads=6, kv_heads=2, head_dim=64, kv_dtype="bfloat16"),
    "head 128, window, pages of 8": Case(
        heads=2, kv_heads=1, head_dim=128, page_size=8, window=70, kv_dtype="bfloat16"
    ),
    "head 128, float16, pages of 128": Case(
        heads=8, kv_heads=1, head_dim=128, page_size=128, kv_dtype="float16"
    ),
    "head 256, softcap": Case(heads=2, kv_heads=1, head_dim=256, softcap=1.5, kv_dtype="bfloat16"),
}
PROMPT_CASES = {
    "gqa 3, head 64": Case(heads=6, kv_heads=2, head_dim=64, kv_dtype="bfloat16"),
    "head 128, window, pages of 32": Case(
        heads=1, kv_heads=1, head_dim=128, page_size=32, window=150, kv_dtype="bfloat16"
    ),
    "gqa 5, softcap, float16, pages of 256": Case(
        heads=5, kv_heads=1, head_dim=64, page_size=256, softcap=1.5, kv_dtype="float16"
    ),
}


@pytest.fixture
def backend(monkeypatch):
    """Between Triton's kernels, in its interpreter, Mosaic GPU's in its own."""
    triton_backend(monkeypatch, jax_triton, AttentionArgs)
    if jax.__version_info__ < mosaic_gpu.OLDEST_JAX:
        pytest.skip("Mosaic GPU's interpreter is not complete in this version of jax")
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from llmjax_kernels.paged_attention import mosaic_prefill

    monkeypatch.setattr(mosaic_prefill, "_add_product", add_product)
    monkeypatch.setenv("LLMJAX_KERNELS", "mosaic")

    def run(*fields):
        args = AttentionArgs(*fields)
        gpu = GPU if args.batch.decode_only else SMALL
        with compiling_for(gpu), plgpu.force_gpu_interpret_mode():
            assert mosaic_gpu.supports(args)
            return mosaic_gpu.run(args)

    return run


def add_product(out, weights, values):
    """As `mosaic_prefill._add_product`; the interpreter multiplies only what is in memory."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    values = values[...]
    plgpu.commit_smem()  # reads by threads, not by wgmma, are to be over before TMA writes there
    return out + jnp.dot(weights, values, preferred_element_type=jnp.float32)


@pytest.mark.parametrize("case", DECODE_CASES.values(), ids=DECODE_CASES)
def test_decodes(backend, case):
    check(backend, case, DECODES, case.kv_dtype, decode_only=True, sinks=case.softcap is None)


@pytest.mark.parametrize("case", PROMPT_CASES.values(), ids=PROMPT_CASES)
def test_prompts_chunks_and_decodes_in_one_step(backend, case):
    check(backend, case, PROMPTS, case.kv_dtype, tokens=TOKENS, sinks=case.window is not None)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_decoding_waits_for_what_it_reads(backend, head_dim):
    assert not is_out_of_step(decode(head_dim))


def test_prefill_waits_for_what_it_reads(backend):
    assert not is_out_of_step(prefill)


def test_not_waiting_is_seen(backend, monkeypatch):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    assert is_out_of_step(decode(64))
    assert is_out_of_step(prefill)


def decode(head_dim):
    """One sequence of four blocks, the last not full."""
    from llmjax_kernels.paged_attention import mosaic_common as common
    from llmjax_kernels.paged_attention import mosaic_decode as kernels

    def run():
        q = jnp.ones((1, 1, 3, head_dim), jnp.bfloat16)
        pages = jnp.ones((8, 32, 1, head_dim), jnp.bfloat16)
        lens, tables = jnp.full(1, 200, jnp.int32), jnp.arange(8, dtype=jnp.int32)[None]
        arithmetic, cut = common.Arithmetic(0.1, 0.0, 0), kernels.Cut(splits=1, stages=2, least=1)
        attend = kernels.attend.__wrapped__  # not as an earlier test has traced it
        return attend(q, pages, pages, lens, tables, arithmetic, cut)

    return run


def prefill():
    """A tile and a part of one, five blocks, the last not full; two in shared memory."""
    from llmjax_kernels.paged_attention import mosaic_common as common
    from llmjax_kernels.paged_attention import mosaic_prefill as kernels

    q = jnp.ones((48, 3, 64), jnp.bfloat16)
    pages = jnp.ones((5, 128, 1, 64), jnp.bfloat16)
    tables = jnp.arange(5, dtype=jnp.int32)[None]
    starts, lens = jnp.array([0, 48], jnp.int32), jnp.array([600], jnp.int32)
    batch = make_ragged_batch(starts, lens, tables, 48, decode_only=False)
    tiles = cut_into_tiles(batch, mosaic_gpu.tile_size(3))
    sinks = jnp.full(3, common.NOTHING)
    arithmetic = common.Arithmetic(0.1, 0.0, 0)
    return kernels.attend.__wrapped__(q, pages, pages, tiles, tables, sinks, arithmetic, stages=2)


def is_out_of_step(attend):
    """Whether Mosaic's interpreter finds a race, or a barrier that nobody waits for."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
    from jax.experimental.pallas import mosaic_gpu as plgpu

    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            jax.block_until_ready(attend())
    except jax.errors.JaxRuntimeError as error:
        said = ("RACE DETECTED", "no threads observed", "had only observed")
        assert any(message in str(error) for message in said)
        interpreter.reset_gpu_interpret_mode_state()
        return True
    return interpreter.get_races().races_found


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(0, 70), min_size=5, max_size=5),
    before=st.lists(st.integers(0, 300), min_size=5, max_size=5),
    size=st.sampled_from([8, 40, 128]),
)
def test_tiles_have_each_token_once_and_of_one_run(counts, before, size):
    starts = np.cumsum([0, *counts]).astype(np.int32)
    lens = np.array([n and n + b for n, b in zip(counts, before, strict=True)], np.int32)
    S, T = 5, 352
    tables = jnp.zeros((S, 1), jnp.int32)
    batch = make_ragged_batch(jnp.asarray(starts), jnp.asarray(lens), tables, T, decode_only=False)
    tiles = np.asarray(cut_into_tiles(batch, size))
    positions = np.asarray(batch.positions)
    found = np.zeros(T, int)
    for seq, start, first, stop, position in tiles:
        assert 0 <= seq < S and start % 8 == 0
        if first >= stop:
            assert position + stop - start == 0
            continue
        assert start <= first < stop <= start + size
        tokens = np.arange(first, stop)
        found[tokens] += 1
        if first < starts[-1]:
            assert starts[seq] <= first and stop <= starts[seq + 1]
            np.testing.assert_array_equal(positions[tokens], position + tokens - start)
        else:
            assert position + stop - start <= 0  # padding sees nothing
    assert (found == 1).all()
    used = tiles[tiles[:, 2] < tiles[:, 3]]
    assert (np.diff(used[:, 2]) < 0).all()  # last to first
