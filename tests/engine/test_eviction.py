"""Requests longer than their budget: what the model then sees, and that nothing else shows."""

from __future__ import annotations

import random
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax import LLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.condense import Condenser, of_all_copies
from llmjax.engine.pipeline import make_programs
from llmjax.errors import ConfigError, InvalidRequestError
from llmjax.parallel.partition import Sizes, partition
from llmjax_kernels import native

from .forgetful import logprobs
from .said import assert_idle, tokens

SIZES = {
    "block_size": 16,
    "kv_budget": 128,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "token_buckets": (128,),
    "seq_buckets": (8,),
    "prefill_chunk_size": 96,
    "num_gpu_blocks_override": 400,
    "background": False,
    "dtype": "float32",
}
POLICIES = ("streaming", "snapkv")
TOKENS = [random.Random(1).randrange(3, 250) for _ in range(600)]


def make(model, policy, **options):
    return LLM(str(model), kv_eviction=policy, **{**SIZES, **options})


@pytest.fixture(scope="module", params=POLICIES)
def policy(request):
    return request.param


@pytest.fixture(scope="module", params=["tiny_model", "windowed_model"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def roomy(model, policy):
    """Room for all; these tests give it one request at a time."""
    with make(model, policy, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def cramped(model, policy):
    """Room for the budgets of about two, in small chunks, with a prefix cache."""
    pages = 20 if "llama" in str(model) else 75
    with make(
        model,
        policy,
        num_gpu_blocks_override=pages,
        prefill_chunk_size=16,
        forecast_margin=None,
        swap_space=0.001,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def caching(model, policy):
    with make(model, policy) as llm:
        yield llm


def check_against_dense(llm, tokens):
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, ignore_eos=True)
    output = llm.generate(tokens, params)[0]
    said = output.outputs[0].token_ids
    eviction = llm.engine.layout.eviction
    assert len(tokens) > eviction.budget + eviction.quantum, "tokens leave twice"
    expected = logprobs(llm.model, eviction, [*tokens, *said])
    rows = output.prompt_logprobs[1:]
    ours = [row[token].logprob for row, token in zip(rows, tokens[1:], strict=True)]
    theirs = [expected[i, token] for i, token in enumerate(tokens[1:])]
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
    best = expected[len(tokens) - 1 : -1]
    margin = best.max(-1) - np.take_along_axis(best, np.array(said)[:, None], 1)[:, 0]
    assert margin.max() < 1e-4


def test_agrees_with_a_dense_model_that_forgets(roomy):
    check_against_dense(roomy, TOKENS[:240])


def test_sinks_stay_near_beyond_what_the_model_was_trained_for(tiny_model):
    with make(tiny_model, "streaming", max_model_len=600) as llm:
        check_against_dense(llm, TOKENS[:550])


@pytest.mark.parametrize(("policy", "kind"), [("streaming", "int8"), ("snapkv", "bfloat16")])
def test_pages_of_fewer_bits_lose_little_more(tiny_model, policy, kind):
    """What is kept is moved as it is, and sinks are rounded once more at most."""
    found = {}
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for dtype in ("float32", kind):
        with make(tiny_model, policy, kv_cache_dtype=dtype) as llm:
            rows = llm.generate(TOKENS[:240], params)[0].prompt_logprobs[1:]
            found[dtype] = np.array(
                [row[t].logprob for row, t in zip(rows, TOKENS[1:240], strict=True)]
            )
    whole, late = np.split(np.abs(found["float32"] - found[kind]), [128])
    assert late.mean() < 3 * whole.mean() + 1e-3


loads = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 170), st.integers(1, 60)), min_size=2, max_size=8
)


@settings(max_examples=6, deadline=None)
@given(loads)
def test_tokens_depend_on_nothing_but_the_prompt(roomy, cramped, load):
    """Alone and whole; in a crowd, in chunks, preempted, moved, found in the cache."""
    prompts = [TOKENS[start : start + 20] * (start > 1) + TOKENS[:n] for start, n, _ in load]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, _, n in load]
    expected = [tokens(roomy.generate(p, q))[0] for p, q in zip(prompts, params, strict=True)]
    assert tokens(cramped.generate(prompts, params, use_tqdm=False)) == expected
    assert_idle(cramped)
    assert_idle(roomy)


def test_a_crowd_is_preempted_and_says_the_same(roomy, cramped):
    prompts = [TOKENS[i : i + 60] for i in range(4)]
    params = SamplingParams(
        temperature=0.9, seed=3, max_tokens=150, ignore_eos=True, repetition_penalty=1.2, n=2
    )
    before = cramped.engine.stats().num_preemptions
    found = tokens(cramped.generate(prompts, params, use_tqdm=False))
    assert cramped.engine.stats().num_preemptions > before
    assert found == [t for p in prompts for t in tokens(roomy.generate(p, params))]
    assert_idle(cramped)


def test_only_what_came_before_is_remembered(caching):
    budget = caching.engine.layout.eviction.budget
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first, again = (caching.generate(TOKENS[:230], params)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert budget - 16 <= again.num_cached_tokens <= budget
    assert tokens([first]) == tokens([again])
    assert_idle(caching)


def test_a_request_goes_on_where_memory_does_not_hold_it(tiny_model):
    """A pool of 9 pages, 144 tokens, for 600."""
    with make(tiny_model, "streaming", max_model_len=600, num_gpu_blocks_override=9) as llm:
        stats = llm.engine.stats()
        assert stats.pages_free == 9
        params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
        assert len(llm.generate(TOKENS[:90], params)[0].outputs[0].token_ids) == 500
        assert_idle(llm)
        with pytest.raises(InvalidRequestError):
            llm.generate(TOKENS[:601], params)


def test_pages_of_a_long_request_are_those_of_its_budget(caching):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    most = caching.engine.layout.most_pages(256, 96)
    request = caching.stream({"prompt_token_ids": TOKENS[:240]}, params)
    used = [caching.engine.stats().pages_used for _ in request]
    assert 0 < max(used) <= most
    assert "at most 128 tokens" in caching.engine.describe()


@pytest.mark.parametrize("devices", [2, 3, 6, 8])
def test_what_stays_is_chosen_by_the_queries_that_there_are(devices):
    """9 query heads to 3 key-value heads; over 6 devices some are there twice."""
    sizes = Sizes(9, 3, 1, 8)
    parts = partition(sizes, devices)
    divided = parts.sizes
    mass = np.random.default_rng(0).uniform(size=(9, 5)).astype(np.float32)
    queries = parts.sources.get("queries", np.arange(9))
    kv_heads = parts.sources.get("kv_heads", np.arange(3))
    shape = (devices, divided.num_kv_heads // devices, divided.num_heads // divided.num_kv_heads, 5)
    look = partial(of_all_copies, copies=parts.kv_copies, queries=3, devices=devices)
    found = jax.vmap(look, axis_name="tensor")(mass[queries].reshape(shape)).reshape(-1, 5)
    expected = mass.reshape(3, 3, 5).sum(axis=1)
    there = kv_heads >= 0
    np.testing.assert_allclose(found[there], expected[kv_heads[there]], rtol=1e-5)


def test_what_is_kept_is_found_without_a_copy_of_the_pool(roomy):
    engine = roomy.engine
    sizes = {"slots": 8, "max_model_len": engine.max_model_len, "max_logprobs": 20}
    programs = make_programs(engine.model, engine.layout, engine.kv_format, **sizes)

    def temporaries(factor):
        condenser = Condenser(programs.parts, programs.cuts, factor * engine.num_pages)
        return condenser.stages[0].program.memory_analysis().temp_size_in_bytes

    assert temporaries(1) == temporaries(20)


@pytest.mark.skipif(not native.available(), reason="the native kernels are not there")
def test_native_kernels_and_xla_forget_alike(tiny_model, policy, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for kernels in ("native", "xla"):
        monkeypatch.setenv("LLMJAX_KERNELS", kernels)
        with make(tiny_model, policy) as llm:
            assert llm.engine.model.native == (kernels == "native")
            rows = llm.generate(TOKENS[:240], params)[0].prompt_logprobs[1:]
            found.append([row[t].logprob for row, t in zip(rows, TOKENS[1:240], strict=True)])
    np.testing.assert_allclose(*found, atol=2e-4)


REFUSED = [
    ({"kv_eviction": "h2o"}, "kv_eviction is 'h2o', allowed: streaming, snapkv, or none"),
    ({"kv_budget": 512}, "kv_budget is 512, allowed: none, as kv_eviction is none"),
    ({"kv_eviction": "snapkv", "kv_budget": 120}, "multiples of the block_size .16. from 128"),
    ({"kv_eviction": "snapkv", "kv_budget": 1000}, "multiples of the block_size"),
    (
        {"kv_eviction": "streaming", "enable_chunked_prefill": False},
        "kv_eviction is 'streaming', allowed without enable_chunked_prefill: none",
    ),
    (
        {"kv_eviction": "snapkv", "prefill_from": ("memory",)},
        "kv_eviction is 'snapkv', allowed with prefill_from: none",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of("m", **options)


def test_what_the_model_does_not_allow_is_refused(tiny_model, windowed_model):
    with pytest.raises(ConfigError, match="max_model_len is 300, the model allows up to 256"):
        make(tiny_model, "snapkv", max_model_len=300)
    with pytest.raises(ConfigError, match="kv_budget is 512, the model allows up to 256"):
        make(tiny_model, "streaming", max_model_len=600, kv_budget=512)
    with pytest.raises(ConfigError, match="max_model_len is 600, the model allows up to 256"):
        make(tiny_model, "streaming", max_model_len=600, kv_budget=1024)
    with pytest.raises(ConfigError, match="kv_budget is 64, allowed: 96 or more"):
        make(windowed_model, "streaming", block_size=4, kv_budget=64)
