"""What is shared, remembered, moved or given back changes no token."""

from __future__ import annotations

import random
import time

import pytest

from llmjax import LLM, SamplingParams

from .said import assert_idle, tokens

SIZES = {
    "block_size": 4,
    "max_num_seqs": 8,
    "token_buckets": (16, 128),
    "seq_buckets": (8,),
    "prefill_chunk_size": 16,
    "max_model_len": 128,
    "background": False,
}
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def make(model, pages, **options):
    return LLM(str(model), num_gpu_blocks_override=pages, **{**SIZES, **options})


@pytest.fixture(scope="module", params=["tiny_model", "windowed_model"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def plain(model):
    """Remembers nothing and has room for all."""
    with make(model, 1600, enable_prefix_caching=False, swap_space=0.0) as llm:
        yield llm


@pytest.fixture(scope="module")
def caching(model):
    with make(model, 1600) as llm:
        yield llm


def prompts(seed, shared, count, most=30):
    rng = random.Random(seed)
    start = [rng.randrange(3, 250) for _ in range(shared)]
    own = [[rng.randrange(3, 250) for _ in range(rng.randint(1, most))] for _ in range(count)]
    return [start + tail for tail in own]


def test_a_shared_beginning_is_computed_once(plain, caching):
    batch = prompts(1, shared=70, count=12)
    expected = tokens(plain.generate(batch, PARAMS, use_tqdm=False))
    outputs = caching.generate(batch, PARAMS, use_tqdm=False)
    assert tokens(outputs) == expected
    cached = [output.num_cached_tokens for output in outputs]
    assert cached[0] < 8 and all(count >= 68 for count in cached[1:])
    assert_idle(caching)


def test_a_conversation_goes_on_from_what_is_there(plain, caching):
    history = prompts(2, shared=20, count=1)[0]
    for turn in range(4):
        ours, theirs = (llm.generate(history, PARAMS)[0] for llm in (caching, plain))
        assert tokens([ours]) == tokens([theirs])
        if turn:
            assert ours.num_cached_tokens >= len(history) - 8
        history = history + ours.outputs[0].token_ids + [7, 8, 9]


def test_a_whole_hit_still_computes_the_last_token(plain, caching):
    (prompt,) = prompts(3, shared=31, count=1, most=1)
    for _ in range(3):
        output = caching.generate(prompt, PARAMS)[0]
        assert tokens([output]) == tokens(plain.generate(prompt, PARAMS))
    assert output.num_cached_tokens == len(prompt) - 1


def test_choices_and_penalties_see_the_whole_prompt(plain, caching):
    (prompt,) = prompts(4, shared=40, count=1)
    params = SamplingParams(
        n=6,
        seed=3,
        max_tokens=12,
        ignore_eos=True,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        logprobs=1,
    )
    for _ in range(2):
        ours, theirs = (llm.generate(prompt, params)[0] for llm in (caching, plain))
        assert tokens([ours]) == tokens([theirs])
    assert ours.num_cached_tokens == len(prompt) - 1
    assert_idle(caching)
    assert_idle(plain)


def test_prompt_logprobs_are_complete_on_a_hit(plain, caching):
    (prompt,) = prompts(5, shared=40, count=1)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    caching.generate(prompt, PARAMS)
    rows = caching.generate(prompt, params)[0].prompt_logprobs
    expected = plain.generate(prompt, params)[0].prompt_logprobs
    assert [list(row or ()) for row in rows] == [list(row or ()) for row in expected]


@pytest.mark.parametrize("swap", [0.0, 0.01])
def test_a_pool_far_too_small_changes_nothing(model, plain, swap):
    batch = prompts(6, shared=20, count=24, most=60)
    params = SamplingParams(
        temperature=0.8, seed=9, max_tokens=30, ignore_eos=True, frequency_penalty=0.3
    )
    expected = tokens(plain.generate(batch, params, use_tqdm=False))
    groups = plain.engine.layout.num_groups
    with make(model, 40 * groups, swap_space=swap, kv_offloading_size=swap) as llm:
        assert tokens(llm.generate(batch, params, use_tqdm=False)) == expected
        stats = llm.engine.stats()
        assert stats.num_preemptions > 0
        assert (stats.pages_saved > 0) == (stats.pages_loaded > 0) == (swap > 0)
        assert_idle(llm)


def test_what_computing_takes_is_not_measured_over_idle_time(model, monkeypatch):
    idle, clock = [0.0], time.perf_counter
    monkeypatch.setattr("llmjax.engine.engine.time.perf_counter", lambda: clock() + idle[0])
    with make(model, 400, prefill_chunk_size=128) as llm:
        for seed in (7, 8):
            batch = [prompts(seed + 10 * i, shared=117, count=1, most=1)[0] for i in range(4)]
            llm.generate(batch, PARAMS, use_tqdm=False)
            compute = llm.engine.host.costs.compute
            assert compute != 1e-3, "it was measured"
            assert compute < 1
            idle[0] += 1e6


def test_a_window_keeps_no_more_than_it_sees(windowed_model):
    with make(windowed_model, 1600, max_model_len=256) as llm:
        windows = llm.engine.layout.windows
        assert sorted(windows, key=str) == [32] * (len(windows) - 1) + [None]
        request = llm.stream({"prompt_token_ids": [5] * 200}, PARAMS)
        next(request)
        used = llm.engine.stats().pages_used
        request.close()
        # All 50 pages and one to write in one group; elsewhere the window, its start rounded
        # down to 64 keys, and the page to write.
        assert used <= 52 + (len(windows) - 1) * ((32 + 64) // 4 + 2)


def test_the_log_says_in_which_units_prefixes_are_reused(windowed_model, tiny_model, caplog):
    caplog.set_level("INFO", logger="llmjax.engine.setup")
    for model in (tiny_model, windowed_model):
        make(model, 400).close()
    told = [line for line in caplog.messages if line.startswith("prefix reuse")]
    assert told == [
        "prefix reuse: in units of 4 tokens",
        "prefix reuse: in units of 4 tokens; a beginning can be had while there is what windows "
        "of 32 tokens see at its end, from a multiple of 64 on",
    ]
