"""The engine behind an event loop: aborts, slow listeners, refusals, shutting down."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from types import SimpleNamespace

import jax
import pytest

from llmjax import RequestOptions, SamplingParams, StructuredOutputs
from llmjax.config import EngineConfig
from llmjax.engine import engine_thread
from llmjax.engine.async_engine import AsyncEngine
from llmjax.errors import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    RequestTimeoutError,
    ShutdownError,
)

PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def config(tiny_model, **options):
    sizes = {
        "max_model_len": 96,
        "block_size": 4,
        "max_num_seqs": 16,
        "token_buckets": (16, 48),
        "seq_buckets": (4, 16),
        "num_gpu_blocks_override": 80,
        "prefill_chunk_size": 16,
        "background": False,
    }
    return EngineConfig.of(str(tiny_model), **{**sizes, **options})


@pytest.fixture(scope="module")
def make_engine(tiny_model):
    """One loaded engine a configuration; the thread is started by each test's own loop."""

    def make(**options):
        return AsyncEngine(config(tiny_model, **options))

    return make


async def collect(engine, request_id, prompt, params=PARAMS):
    tokens, text, reason = [], "", None
    async for output in engine.generate(request_id, prompt, params):
        for choice in output.outputs:
            tokens += choice.token_ids
            text += choice.text
            reason = choice.finish_reason or reason
    return tokens, text, reason


async def until(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about in 5 s")


async def settle(engine):
    await until(lambda: not engine.engine.has_work and not engine.thread.inbox)


def test_two_hundred_streams_aborted_at_random_moments_leak_nothing(make_engine):
    engine = make_engine()
    rng = random.Random(0)

    async def one(i):
        await asyncio.sleep(rng.random() * 2)
        prompt = [rng.randrange(3, 320) for _ in range(rng.randrange(1, 60))]
        task = asyncio.create_task(collect(engine, f"r{i}", prompt))
        await asyncio.sleep(rng.random() * 0.5)
        if rng.random() < 0.3:
            engine.abort(f"r{i}")
            assert (await task)[2] in ("abort", "length")
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def main():
        engine.start()
        expected = await collect(engine, "before", [9, 10, 11])
        await asyncio.gather(*(one(i) for i in range(200)))
        await settle(engine)
        stats = engine.stats()
        assert (stats.pages_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
        engine.engine.scheduler.check_balance()
        assert not engine.streams.num_requests and not engine.streams.processor._states
        assert await collect(engine, "after", [9, 10, 11]) == expected
        await engine.drain(5)

    asyncio.run(main())


def test_a_grammar_that_takes_long_holds_up_nobody_and_may_be_given_up(make_engine, monkeypatch):
    """sglang 39125, 22273: others go on while it is compiled, and an abort then leaves nothing."""
    engine, begun, may_end = make_engine(), threading.Event(), threading.Event()
    real = engine.engine.grammars._compile

    def slow(wanted):
        begun.set()
        assert may_end.wait(60)
        return real(wanted)

    monkeypatch.setattr(engine.engine.grammars, "_compile", slow)
    bound = SamplingParams(structured_outputs=StructuredOutputs(regex="[ab]{5}"))

    async def main():
        engine.start()
        kept, given_up = (
            asyncio.create_task(collect(engine, name, [9], bound)) for name in ("kept", "given up")
        )
        await until(begun.is_set)
        tokens, _, _ = await collect(engine, "other", [9, 10, 11])
        assert len(tokens) == 30 and not kept.done()
        engine.abort("given up")
        assert (await given_up)[2] == "abort"
        may_end.set()
        assert re.fullmatch("[ab]{5}", (await kept)[1])
        await settle(engine)
        assert engine.stats().pages_used == 0 and not engine.streams.num_requests
        await engine.drain(5)

    asyncio.run(main())


def test_a_listener_that_is_slow_gets_all_of_it(make_engine):
    engine = make_engine()

    async def main():
        engine.start()
        expected = await collect(engine, "fast", [20, 21])
        tokens, outputs = [], 0
        async for output in engine.generate("slow", [20, 21], PARAMS):
            await asyncio.sleep(0.2)
            outputs += 1
            tokens += [t for choice in output.outputs for t in choice.token_ids]
        assert tokens == expected[0]
        assert outputs < len(tokens)
        await engine.drain(5)

    asyncio.run(main())


def test_refusals_reach_their_caller_alone(make_engine):
    engine = make_engine(max_queue_len=2, max_num_seqs=1, seq_buckets=(1,), token_buckets=(48,))

    async def main():
        engine.start()
        with pytest.raises(InvalidRequestError, match="vocabulary"):
            await collect(engine, "bad", [999])
        many = [collect(engine, f"q{i}", [5, 6]) for i in range(12)]
        results = await asyncio.gather(*many, return_exceptions=True)
        full = [r for r in results if isinstance(r, QueueFullError)]
        done = [r for r in results if isinstance(r, tuple)]
        assert full and done and len(full) + len(done) == 12
        assert all(len(tokens) == 30 for tokens, _, _ in done)
        assert full[0].retry_after >= 1
        await engine.drain(5)

    asyncio.run(main())


def test_draining_finishes_what_runs_and_refuses_the_rest(make_engine):
    engine = make_engine()

    async def main():
        engine.start()
        running = [asyncio.create_task(collect(engine, f"d{i}", [5, i + 3])) for i in range(4)]
        await asyncio.sleep(0.05)
        draining = asyncio.create_task(engine.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(ShutdownError, match="takes no new requests"):
            await collect(engine, "late", [5])
        assert await draining == 0
        assert [len((await task)[0]) for task in running] == [30] * 4
        await until(lambda: not engine.is_alive)
        with pytest.raises(ShutdownError, match="shut down"):
            engine.check_health()

    asyncio.run(main())


def test_what_outlasts_the_drain_is_cut_off_and_counted(make_engine, monkeypatch):
    engine = make_engine()

    async def main():
        engine.start()
        monkeypatch.setattr(engine.engine, "step", list)
        running = [asyncio.create_task(collect(engine, f"d{i}", [5])) for i in range(3)]
        await asyncio.sleep(0.05)
        assert engine.num_requests == 3
        assert await engine.drain(0.1) == 3
        for result in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(result, ShutdownError)
            assert str(result) == "the engine was shut down before the request had ended"
        assert engine.num_requests == 0

    asyncio.run(main())


def test_an_id_may_be_used_again_while_its_request_is_on_its_way_out(make_engine):
    engine = make_engine()

    async def main():
        engine.start()
        expected = await collect(engine, "before", [20, 21])
        for _ in range(20):
            stream = engine.generate("same", [9, 10, 11], PARAMS)
            assert (await anext(stream)).request_id == "same"
            await stream.aclose()
            assert await collect(engine, "same", [20, 21]) == expected
        both = await asyncio.gather(*(collect(engine, "same", [20, 21]) for _ in range(2)))
        assert both == [expected] * 2
        await settle(engine)
        assert engine.stats().pages_used == 0 and not engine.streams.processor._states
        await engine.drain(5)

    asyncio.run(main())


def test_health_is_steps_that_get_done_while_there_is_work(make_engine, monkeypatch):
    engine, now = make_engine(), 0.0
    step = engine.engine.step
    monkeypatch.setattr(engine_thread, "time", SimpleNamespace(monotonic=lambda: now))

    async def main():
        nonlocal now
        engine.start()
        now += 1000
        engine.check_health()  # nobody asked for anything
        monkeypatch.setattr(engine.engine, "step", list)  # turns of the loop are no progress
        task = asyncio.create_task(collect(engine, "stuck", [5]))
        await until(lambda: engine.engine.has_work)
        engine.check_health()
        now += 1000
        with pytest.raises(EngineDeadError, match="no progress for 1000 s"):
            engine.check_health()
        monkeypatch.setattr(engine.engine, "step", step)
        assert len((await task)[0]) == 30
        engine.check_health()
        await engine.drain(5)

    asyncio.run(main())


@pytest.mark.parametrize("part", ["dispatch", "sample", "collect"])
def test_a_step_that_fails_takes_its_requests_along_and_no_others(make_engine, monkeypatch, part):
    engine = make_engine(max_num_seqs=1, seq_buckets=(1,), token_buckets=(48,))
    runner, prompts = engine.engine.runner, [[5 + i, *range(20, 40)] for i in range(3)]
    works, broken = getattr(runner, part), []

    def breaks(*args):
        if engine.engine.num_steps < 12 or broken:
            return works(*args)
        broken.append(part)
        for array in jax.tree.leaves(runner._state):
            array.delete()  # as a program does with what it was given
        raise RuntimeError("out of memory")

    async def main():
        engine.start()
        expected = [await collect(engine, f"a{i}", p) for i, p in enumerate(prompts)]
        engine.engine.num_steps = 0
        monkeypatch.setattr(runner, part, breaks)
        each = (collect(engine, f"x{i}", p) for i, p in enumerate(prompts))
        results = await asyncio.gather(*each, return_exceptions=True)
        failed = [r for r in results if isinstance(r, RequestFailedError)]
        assert broken and len(failed) == 1
        assert str(failed[0].__cause__) == "out of memory"
        for result, alone in zip(results, expected, strict=True):
            assert result == alone or result in failed
        await settle(engine)
        engine.check_health()
        engine.engine.scheduler.check_balance()
        assert engine.stats().pages_used == 0 and not engine.streams.processor._states
        totals = engine.metrics.totals()
        assert (totals["steps_failed_total"], totals["requests_failed_total"]) == (1, 1)
        assert await collect(engine, "again", prompts[0]) == expected[0]
        await engine.drain(5)

    asyncio.run(main())


def test_what_fails_between_steps_fails_alone(make_engine, monkeypatch):
    engine = make_engine()
    add, calls = engine.engine.add, []

    def add_or_not(request):
        calls.append(request)
        if len(calls) == 2:
            add(request)
            raise KeyError("nobody thought of that")
        add(request)

    def no_snapshot(engine):
        raise ZeroDivisionError

    async def main():
        engine.start()
        monkeypatch.setattr(engine.engine, "add", add_or_not)
        monkeypatch.setattr(engine_thread, "take_snapshot", no_snapshot)
        running = asyncio.create_task(collect(engine, "a", [20, 21]))
        await until(lambda: calls)
        with pytest.raises(RequestFailedError, match="nobody thought of that"):
            await collect(engine, "b", [20, 21])
        with pytest.raises(ZeroDivisionError):
            await engine.snapshot()
        assert await running == await collect(engine, "c", [20, 21])
        await settle(engine)
        assert engine.stats().pages_used == 0 and not engine.streams.processor._states
        engine.engine.scheduler.check_balance()
        await engine.drain(5)

    asyncio.run(main())


def test_what_nobody_took_of_a_request_that_is_cut_off_is_told(make_engine):
    engine, told = make_engine(), []

    async def main():
        engine.start()
        stream = engine.generate("cut", [20, 21], PARAMS, on_cut=told.append)
        taken = len((await anext(stream)).outputs[0].token_ids)
        await settle(engine)
        await stream.aclose()
        (rest,) = told
        assert taken + len(rest.outputs[0].token_ids) == 30
        whole = [o async for o in engine.generate("whole", [20], PARAMS, on_cut=told.append)]
        assert whole and len(told) == 1
        early = asyncio.ensure_future(anext(engine.generate("e", [20], PARAMS, on_cut=told.append)))
        await asyncio.sleep(0)
        early.cancel()
        await asyncio.gather(early, return_exceptions=True)
        assert len(told) == 1, "it had not begun"
        long = engine.generate("long", list(range(20, 85)), PARAMS, on_cut=told.append)
        begun = asyncio.ensure_future(anext(long))
        while not any(s.request.began for s in engine.streams._streams.values()):
            await asyncio.sleep(0)
        begun.cancel()  # most likely before its first token
        await asyncio.gather(begun, return_exceptions=True)
        await long.aclose()
        assert len(told[1].prompt_token_ids) == 65
        late = RequestOptions(timeout=1e-3)
        with pytest.raises(RequestTimeoutError):
            prompt = list(range(20, 85))
            await anext(engine.generate("late", prompt, PARAMS, options=late, on_cut=told.append))
        await settle(engine)
        assert not engine.streams.processor._states
        await engine.drain(5)

    asyncio.run(main())


def test_a_step_that_fails_fails_everyone_with_its_cause(make_engine, monkeypatch):
    engine = make_engine()

    async def main():
        engine.start()
        engine.check_health()

        def broken():
            raise RuntimeError("the device fell off")

        monkeypatch.setattr(engine.engine, "step", broken)
        results = await asyncio.gather(
            *(collect(engine, f"x{i}", [5]) for i in range(3)), return_exceptions=True
        )
        assert all(isinstance(r, EngineDeadError) for r in results)
        assert {str(r) for r in results} == {"the engine has stopped: the device fell off"}
        assert {str(r.__cause__) for r in results} == {"the device fell off"}
        with pytest.raises(EngineDeadError, match="fell off"):
            engine.check_health()
        engine.close()

    asyncio.run(main())
