"""How a request is treated beside others: on the way from the caller to the scheduler and back."""

from __future__ import annotations

import asyncio
import time

import pytest

from llmjax import LLM, RequestOptions, SamplingParams
from llmjax.config import EngineConfig
from llmjax.engine.async_engine import AsyncEngine
from llmjax.errors import InvalidRequestError, QueueTimeoutError, RequestTimeoutError

SIZES = {
    "max_model_len": 96,
    "block_size": 4,
    "max_num_seqs": 2,
    "token_buckets": (16, 48),
    "seq_buckets": (2,),
    "num_gpu_blocks_override": 80,
    "background": False,
}
PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


class Clock:
    """Runs ahead of the true one by `ahead` seconds, `after` so many looks at it."""

    def __init__(self, ahead: float, after: int):
        self.ahead, self.after = ahead, after

    def __call__(self) -> float:
        self.after -= 1
        return time.monotonic() + (self.ahead if self.after < 0 else 0)


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), scheduling_policy="priority", **SIZES) as llm:
        yield llm


def idle(engine) -> bool:
    stats = engine.stats()
    engine.scheduler.check_balance()
    return (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)


def test_what_is_late_fails_alone(llm, monkeypatch):
    expected = llm.generate([[9, 10, 11], [12, 13]], PARAMS)
    monkeypatch.setattr(llm.engine.scheduler.lives, "clock", Clock(100.0, after=10))
    options = [RequestOptions(timeout=50), RequestOptions(timeout=500)]
    late, other = llm.generate([[9, 10, 11], [12, 13]], PARAMS, options=options)
    assert isinstance(late.error, RequestTimeoutError)
    assert "its timeout is 50 s" in str(late.error)
    (choice,) = late.outputs
    assert choice.finish_reason == "abort"
    assert 0 < len(choice.token_ids) < 30
    assert choice.token_ids == expected[0].outputs[0].token_ids[: len(choice.token_ids)]
    assert (other.error, other.outputs[0].token_ids) == (None, expected[1].outputs[0].token_ids)
    assert idle(llm.engine)


def test_a_stream_that_is_late_raises(llm, monkeypatch):
    monkeypatch.setattr(llm.engine.scheduler.lives, "clock", Clock(100.0, after=10))
    pieces = llm.stream([9, 10, 11], PARAMS, options=RequestOptions(timeout=50))
    with pytest.raises(RequestTimeoutError):
        for piece in pieces:
            assert piece.outputs[0].token_ids
    assert idle(llm.engine)


def test_priorities_arrive_and_decide(llm, monkeypatch):
    began = []
    schedule = llm.engine.scheduler.schedule

    def watched():
        plan = schedule()
        began.extend(chunk.seq.request.options for chunk in (plan.admitted if plan else ()))
        return plan

    monkeypatch.setattr(llm.engine.scheduler, "schedule", watched)
    prompts = [[9, 10, 20 + p] for p in range(6)]
    llm.generate(prompts, PARAMS, priority=[5, 4, 3, 2, 1, 0], options=RequestOptions(user="me"))
    assert [o.priority for o in began] == [0, 1, 2, 3, 4, 5]
    assert {o.user for o in began} == {"me"}


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"priority": "high"}, "priority", "int, a list of them, or None"),
        ({"priority": [1, 2]}, "priority", "1 prompts came with 2 priority"),
        ({"options": {"user": "me"}}, "options", "RequestOptions, a list of them, or None"),
    ],
)
def test_options_of_the_wrong_type_are_refused(llm, options, param, message):
    with pytest.raises(InvalidRequestError, match=message) as error:
        llm.generate("a", PARAMS, **options)
    assert error.value.param == param
    assert idle(llm.engine)


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"priority": 1.5}, "an integer"),
        ({"priority": 2**63}, "an integer from"),
        ({"cache_salt": ""}, "a non-empty string"),
        ({"user": 7}, "a string or None"),
        ({"timeout": 0}, "seconds, above 0"),
        ({"timeout": float("nan")}, "seconds, above 0"),
        ({"queue_timeout": float("inf")}, "seconds, above 0"),
    ],
)
def test_values_are_checked(values, allowed):
    with pytest.raises(InvalidRequestError, match=allowed) as error:
        RequestOptions(**values)
    assert error.value.param == next(iter(values))


def test_the_async_engine_tells_the_late_and_serves_the_rest(tiny_model):
    sizes = {**SIZES, "queue_timeout": 60.0, "enable_prefix_caching": True}
    engine = AsyncEngine(EngineConfig.of(str(tiny_model), **sizes))

    async def one(prompt, **options):
        tokens, cached = [], 0
        stream = engine.generate("r", prompt, PARAMS, options=RequestOptions(**options))
        async for output in stream:
            cached = output.num_cached_tokens
            tokens += [t for choice in output.outputs for t in choice.token_ids]
        return tokens, cached

    async def main():
        engine.start()
        prompt = list(range(9, 29))
        expected, _ = await one(prompt)
        assert await one(prompt) == (expected, 19)
        assert await one(prompt, cache_salt="s") == (expected, 0)
        with pytest.raises(InvalidRequestError, match="allowed: 0, as the scheduling policy is"):
            await one(prompt, priority=1)
        scheduler = engine.engine.scheduler
        scheduler.lives.clock = Clock(100.0, after=5)
        results = await asyncio.gather(
            one(prompt, timeout=99.0),
            one(prompt),
            one(prompt),
            one(prompt, queue_timeout=30.0),
            return_exceptions=True,
        )
        assert isinstance(results[0], RequestTimeoutError)
        assert results[1][0] == expected
        assert all(isinstance(r, QueueTimeoutError) and r.retry_after == 60 for r in results[2:])
        for _ in range(100):
            await asyncio.sleep(0.01)
            if not engine.engine.has_work:
                break
        assert idle(engine.engine)
        await engine.drain(5)

    asyncio.run(main())
