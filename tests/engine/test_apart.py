"""Prefill and decode apart: the tokens are those of one engine, whoever computes the prompt."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from llmjax import LLM, RequestOptions, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.engine import Engine
from llmjax.engine.prefill_worker import PrefillWorker, terms_of
from llmjax.errors import ConfigError, PrefillMismatchError, RequestTimeoutError
from llmjax.request import Request
from llmjax.transfer.server import Listener
from llmjax.transfer.sockets import Address

from .said import assert_idle

SIZES = {
    "block_size": 4,
    "max_num_seqs": 8,
    "token_buckets": (16,),
    "seq_buckets": (8,),
    "prefill_chunk_size": 16,
    "max_model_len": 128,
    "num_gpu_blocks_override": 1600,
    "background": False,
    "swap_space": 0.05,
}
APART = {"prefill_min_tokens": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SEEDED = SamplingParams(
    n=3, temperature=0.9, seed=4, max_tokens=8, ignore_eos=True, repetition_penalty=1.3, logprobs=1
)


class Worker:
    """A prefill worker in a thread, behind a socket."""

    def __init__(self, model, address, **options):
        where = Address.of(address)
        self.engine = Engine(EngineConfig.of(str(model), **{**SIZES, **options}))
        self.worker = PrefillWorker(self.engine)
        deliver = self.worker.deliver
        self.listener = Listener(where, where.listen(), terms_of(self.engine), deliver)
        self.address = self.listener.address
        self.thread = threading.Thread(target=self.worker.run)
        self.thread.start()

    def close(self):
        self.listener.close()
        self.worker.stop()
        self.thread.join()
        self.engine.close()


@contextmanager
def apart(model, address, **options):
    """An engine that decodes, and a worker."""
    options = {**SIZES, **APART, **options}
    if address == "memory":
        with LLM(str(model), prefill_from="memory", **options) as llm:
            yield llm
        return
    ours = {k: v for k, v in options.items() if not k.startswith("prefill_") or k in SIZES}
    with (
        closing(Worker(model, address, **ours)) as worker,
        LLM(str(model), prefill_from=(worker.address,), **options) as llm,
    ):
        yield llm


def alone(model, **options):
    return LLM(str(model), enable_prefix_caching=False, **{**SIZES, **options})


def prompts(seed, shared, count, most=40):
    rng = random.Random(seed)
    start = [rng.randrange(3, 250) for _ in range(shared)]
    own = [[rng.randrange(3, 250) for _ in range(rng.randint(1, most))] for _ in range(count)]
    return [start + tail for tail in own]


def said(outputs):
    return [(c.token_ids, c.text) for output in outputs for c in output.outputs]


def metric(llm, name):
    return llm.engine.metrics.totals()[f"{name}_total"]


def assert_nothing_held(llm):
    assert_idle(llm)
    assert llm.engine.stats().num_held == 0
    llm.engine.handover.check_balance()
    assert not any(worker._open for worker in llm.engine.handover.workers)


@pytest.fixture(scope="module")
def plain_tiny(tiny_model):
    with alone(tiny_model) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain_windowed(windowed_model):
    with alone(windowed_model) as llm:
        yield llm


@pytest.fixture(
    scope="module",
    params=[
        ("tiny", "memory"),
        ("tiny", "tcp://127.0.0.1:0"),
        ("tiny", "shm://test-apart"),
        ("windowed", "shm://test-apart"),
    ],
)
def pair(request):
    """One engine, and two that share the work."""
    name, address = request.param
    model = request.getfixturevalue(f"{name}_model")
    with apart(model, address) as llm:
        yield request.getfixturevalue(f"plain_{name}"), llm


@pytest.fixture
def plain(pair):
    return pair[0]


@pytest.fixture
def both(pair):
    return pair[1]


def test_tokens_are_those_of_one_engine(plain, both):
    before = metric(both, "prefill_jobs")
    load = prompts(1, shared=30, count=12)
    assert said(both.generate(load, GREEDY, use_tqdm=False)) == said(
        plain.generate(load, GREEDY, use_tqdm=False)
    )
    assert metric(both, "prefill_jobs") > before
    assert metric(both, "prefill_jobs_failed") == 0
    assert metric(both, "prefill_pages") > 0
    assert both.engine.stats().pages_loaded > 0
    assert_nothing_held(both)


def test_seeds_choices_and_penalties_too(plain, both):
    load = prompts(2, shared=0, count=5, most=90)
    params = [SEEDED, GREEDY, SEEDED, SEEDED, GREEDY]
    assert said(both.generate(load, params, use_tqdm=False)) == said(
        plain.generate(load, params, use_tqdm=False)
    )
    assert_nothing_held(both)


def test_conversations_go_on_from_what_either_side_has(plain, both):
    (history,) = prompts(3, shared=40, count=1)
    for turn in range(4):
        ours, theirs = (llm.generate(history, GREEDY)[0] for llm in (both, plain))
        assert said([ours]) == said([theirs])
        assert (ours.num_cached_tokens > 20) == (turn > 0)
        rng = random.Random(turn)
        history = history + ours.outputs[0].token_ids + [rng.randrange(3, 250) for _ in range(8)]
    # A prompt that differs only behind what both have, and one that only the worker has.
    both.engine.cache.reset()
    jobs = metric(both, "prefill_jobs")
    again = both.generate(history, GREEDY)[0]
    assert said([again]) == said(plain.generate(history, GREEDY))
    assert metric(both, "prefill_jobs") == jobs + 1
    assert_nothing_held(both)


def test_what_needs_no_worker_asks_none(plain, both):
    before = metric(both, "prefill_jobs")
    scored = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    (long,) = prompts(4, shared=60, count=1)
    for prompt, params in [([5, 6, 7], GREEDY), (long, scored), (long, GREEDY)]:
        ours, theirs = (llm.generate(prompt, params)[0] for llm in (both, plain))
        assert said([ours]) == said([theirs])
    assert metric(both, "prefill_jobs") == before
    assert ours.num_cached_tokens > 40


def test_salts_keep_what_a_worker_remembers_apart(both):
    (prompt,) = prompts(5, shared=60, count=1)
    cached = []
    for salt in ("a", "b", "a"):
        both.engine.cache.reset()
        options = RequestOptions(cache_salt=salt)
        cached.append(both.generate(prompt, GREEDY, options=options)[0].num_cached_tokens)
    assert cached[0] == cached[1] == 0 and cached[2] > 50


def test_pages_of_8_bits_travel(windowed_model):
    load = prompts(6, shared=20, count=6)
    with alone(windowed_model, kv_cache_dtype="int8") as llm:
        expected = said(llm.generate(load, GREEDY, use_tqdm=False))
    with apart(windowed_model, "tcp://127.0.0.1:0", kv_cache_dtype="int8") as llm:
        assert said(llm.generate(load, GREEDY, use_tqdm=False)) == expected
        assert metric(llm, "prefill_pages") > 0
        assert_nothing_held(llm)


@pytest.mark.parametrize(("name", "caching"), [("windowed", True), ("tiny", False)])
def test_a_cramped_pool_and_little_host_memory_change_nothing(request, name, caching):
    model, plain = (request.getfixturevalue(x) for x in (f"{name}_model", f"plain_{name}"))
    load = prompts(7, shared=10, count=24, most=80)
    groups = plain.engine.layout.num_groups
    # Room for the pages of one long prompt, on either side.
    space = (groups * 31 + 0.5) * plain.engine.page_bytes / 2**30
    sizes = {"num_gpu_blocks_override": 40 * groups, "swap_space": space}
    with apart(model, "memory", **sizes, enable_prefix_caching=caching) as llm:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        outputs = llm.generate(load, params, use_tqdm=False)
        assert said(outputs) == said(plain.generate(load, params, use_tqdm=False))
        assert metric(llm, "prefill_pages") > 0
        assert_nothing_held(llm)


def test_host_memory_that_is_too_small_is_refused(tiny_model):
    with pytest.raises(ConfigError, match="swap_space and kv_offloading_size have room for 0"):
        LLM(str(tiny_model), prefill_from="memory", **{**SIZES, "swap_space": 0.0})


def test_terms_tell_models_apart(plain_tiny, plain_windowed):
    ours = terms_of(plain_tiny.engine)
    ours.check(json.loads(json.dumps(dict(ours.values))), "it")
    with pytest.raises(PrefillMismatchError, match=r"model: it has '.*', and this engine 'Llama"):
        ours.check(terms_of(plain_windowed.engine).values, "it")
    engine, model = plain_tiny.engine, plain_tiny.engine.model
    leaves, tree = jax.tree.flatten(model.state)
    leaves[3] = leaves[3] * 1.001
    other = replace(model, state=jax.tree.unflatten(tree, leaves))
    like = SimpleNamespace(**{**vars(engine), "model": other})
    assert terms_of(like).values["model"] != ours.values["model"]


def test_a_worker_that_is_lost_while_it_computes(tiny_model, plain_tiny, caplog):
    load = prompts(8, shared=0, count=30, most=100)
    expected = said(plain_tiny.generate(load, GREEDY, use_tqdm=False))
    worker = Worker(tiny_model, "tcp://127.0.0.1:0")
    address = worker.address
    with LLM(str(tiny_model), prefill_from=address, **SIZES, **APART) as llm:
        answer = worker.worker._send_pages
        sent = []

        def die_at_the_third(seq):
            sent.append(seq)
            if len(sent) == 3:
                threading.Thread(target=worker.close).start()
                time.sleep(0.2)
            answer(seq)

        worker.engine.scheduler.lives.on_end = die_at_the_third
        with caplog.at_level(logging.WARNING):
            outputs = llm.generate(load, GREEDY, use_tqdm=False)
        assert said(outputs) == expected
        assert metric(llm, "prefill_jobs_failed") > 0
        told = [r for r in caplog.records if "is computed here" in r.message]
        assert len(told) == 1, "of a row of failures one is told"
        assert_nothing_held(llm)
        assert llm.engine.stats().workers_up == 0
        worker.thread.join()
        with closing(Worker(tiny_model, address)):
            end = time.monotonic() + 30
            while not llm.engine.stats().workers_up and time.monotonic() < end:
                time.sleep(0.05)
            before = metric(llm, "prefill_pages")
            llm.engine.cache.reset()
            assert said(llm.generate(load, GREEDY, use_tqdm=False)) == expected
            assert metric(llm, "prefill_pages") > before
        assert_nothing_held(llm)


@contextmanager
def silent_worker(model, **options):
    """An engine whose worker takes jobs and never answers."""
    with LLM(str(model), prefill_from="memory", **{**SIZES, **APART, **options}) as llm:
        (connector,) = llm.engine.handover.workers
        told = []
        deliver, connector._tell = connector._tell, lambda guest, message: told.append(message)
        yield llm, told
        connector._tell = deliver


def test_a_worker_that_is_late_is_not_waited_for(tiny_model, plain_tiny):
    (prompt,) = prompts(9, shared=60, count=1)
    expected = said(plain_tiny.generate(prompt, GREEDY))
    with silent_worker(tiny_model, prefill_timeout=0.3) as (llm, told):
        assert said(llm.generate(prompt, GREEDY)) == expected
        assert metric(llm, "prefill_jobs_failed") == 1
        assert [type(message).__name__ for message in told] == ["Job", "Cancel"]
        assert_nothing_held(llm)


def test_requests_end_while_they_are_held(tiny_model):
    load = prompts(10, shared=60, count=3)
    with silent_worker(tiny_model) as (llm, told):
        options = RequestOptions(timeout=0.2)
        (late,) = llm.generate(load[0], GREEDY, options=options)
        assert isinstance(late.error, RequestTimeoutError)
        assert_nothing_held(llm)
        stream = llm.stream({"prompt_token_ids": [5, 6, 7]}, GREEDY)
        llm.engine.add(Request("held", load[1], SEEDED))
        assert next(stream).outputs[0].token_ids, "others pass those that are held"
        assert llm.engine.stats().num_held == 1
        deltas = llm.engine.abort("held")
        assert [delta.finish_reason for delta in deltas] == ["abort"] * 3
        assert len(list(stream)) > 1
        assert_nothing_held(llm)
        assert [type(message).__name__ for message in told] == ["Job", "Cancel"] * 2


def test_a_server_takes_requests_while_all_of_its_own_are_held(tiny_model):
    options = {**SIZES, **APART, "prefill_from": "memory"}
    engine = AsyncEngine(EngineConfig.of(str(tiny_model), **options))
    (connector,) = engine.engine.handover.workers
    connector._tell = lambda guest, message: None
    steps = []
    step = engine.engine.step
    engine.engine.step = lambda: steps.append(1) or step()

    async def tokens(name, prompt):
        stream = engine.generate(name, prompt, GREEDY)
        return [t async for out in stream for choice in out.outputs for t in choice.token_ids]

    async def main():
        engine.start()
        (prompt,) = prompts(12, shared=60, count=1)
        held = asyncio.create_task(tokens("held", prompt))
        await asyncio.sleep(0.5)
        assert engine.stats().num_held == 1
        assert len(steps) < 50, "it waits, and does not spin"
        assert len(await tokens("short", [5, 6, 7])) == 10
        held.cancel()
        await asyncio.sleep(0.3)
        assert engine.stats().num_held == engine.stats().num_waiting == 0
        await engine.drain(5)

    asyncio.run(main())
    engine.close()


def test_one_choice_ends_while_its_request_is_held(tiny_model, plain_tiny):
    (prompt,) = prompts(11, shared=60, count=1)
    expected = plain_tiny.generate(prompt, SEEDED)[0].outputs
    with silent_worker(tiny_model, prefill_timeout=1.0) as (llm, _):
        engine, said = llm.engine, {0: [], 1: [], 2: []}
        engine.add(Request("r", prompt, SEEDED))
        deltas = engine.abort("r", 0)
        while engine.has_work:
            deltas += engine.step()
        for delta in deltas:
            said[delta.index] += delta.token_ids
        assert said == {0: [], **{i: expected[i].token_ids for i in (1, 2)}}
        assert_nothing_held(llm)
