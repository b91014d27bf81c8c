"""Limits of a key: by the minute, and at a time."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax_serving.accounts import LIMITER
from llmjax_serving.config import ServerConfig
from llmjax_serving.keys import ApiKey
from llmjax_serving.limits import Limiter, TokenBucket, duration

from .double import EngineDouble, client_of, run_async, until

PROMPT = {"prompt": "abc"}
KEY = {"Authorization": "Bearer k"}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@given(
    per_minute=st.integers(1, 10_000),
    steps=st.lists(st.tuples(st.floats(0, 90), st.integers(1, 500)), max_size=40),
)
@settings(max_examples=100, deadline=None)
def test_a_bucket_gives_no_more_than_its_rate_and_as_much_as_it_says(per_minute, steps):
    clock = Clock()
    bucket, start, taken = TokenBucket(per_minute, clock), clock.now, []
    for pause, amount in steps:
        clock.now += pause
        wait = bucket.seconds_until(1)
        assert (wait == 0) == (bucket.level > 1 - 1e-6)
        if wait:
            # Not a moment sooner, and not a moment later.
            clock.now += wait * 0.99 - 1e-3
            assert bucket.seconds_until(1) > 0 or wait < 0.1
            clock.now += wait * 0.01 + 1e-3
            assert bucket.seconds_until(1) == 0
        bucket.take(amount)
        taken.append((clock.now, amount))
        assert bucket.level <= per_minute
        # From any moment on: what it held, its rate, and the one debt that it lets everyone make.
        for began, _ in [(start, 0), *taken]:
            since = [a for at, a in taken if at >= began]
            most = per_minute + (clock.now - began) * per_minute / 60 + since[-1]
            assert sum(since) <= most + 1e-3


def test_a_limit_that_changes_keeps_what_was_used():
    clock = Clock()
    limiter = Limiter(clock)
    limiter.standing(ApiKey(name="a", digest=b"", tokens_per_minute=60)).charge(50)
    raised = limiter.standing(ApiKey(name="a", digest=b"", tokens_per_minute=600))
    assert raised.tokens.level == 550
    lowered = limiter.standing(ApiKey(name="a", digest=b"", tokens_per_minute=40))
    assert lowered.tokens.level == -10
    assert lowered.tokens.seconds_until(1) == pytest.approx(11 * 60 / 40)
    assert asyncio.run(limiter.standing(ApiKey(name="a", digest=b"")).headers()) == {}


def test_durations_are_written_as_openai_writes_them():
    written = {0: "0ms", 0.12: "120ms", 1: "1s", 59.2: "1m0s", 360: "6m0s", 61.5: "1m2s"}
    assert {seconds: duration(seconds) for seconds in written} == written


def limited(tmp_path, **limits) -> ServerConfig:
    path = tmp_path / "keys.json"
    entries = [{"name": "k", "key": "k", **limits}, {"name": "free", "key": "f"}]
    path.write_text(json.dumps(entries))
    return ServerConfig(api_key_file=str(path))


async def refusal_of(response) -> dict:
    assert response.status == 429
    error = (await response.json())["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    return error


@pytest.mark.parametrize("stream", [False, True])
@run_async
async def test_requests_per_minute(tmp_path, stream):
    clock, body = Clock(), {**PROMPT, "stream": stream}
    async with client_of(EngineDouble(), limited(tmp_path, requests_per_minute=2)) as client:
        client.server.app[LIMITER]._clock = clock

        async def send(headers=KEY):
            return await client.post("/v1/completions", json=body, headers=headers)

        first = await send()
        told = {name: value for name, value in first.headers.items() if "ratelimit" in name}
        assert first.status == 200
        assert told == {
            "x-ratelimit-limit-requests": "2",
            "x-ratelimit-remaining-requests": "1",
            "x-ratelimit-reset-requests": "30s",
        }
        assert (await send()).status == 200
        for _ in range(3):  # what is refused is not counted
            refused = await send()
            assert "2 requests per minute" in (await refusal_of(refused))["message"]
            assert refused.headers["Retry-After"] == "30"
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await client.get("/v1/models", headers=KEY)).status == 200
        assert (await send({"Authorization": "Bearer f"})).status == 200
        clock.now += 30
        assert (await send()).status == 200
        await refusal_of(await send())


@run_async
async def test_tokens_per_minute_count_as_they_are_used(tmp_path):
    clock, engine = Clock(), EngineDouble()
    async with client_of(engine, limited(tmp_path, tokens_per_minute=60)) as client:
        client.server.app[LIMITER]._clock = clock

        async def send(**body):
            body = {**PROMPT, **body}
            return await client.post("/v1/completions", json=body, headers=KEY)

        # 3 of the prompt and 5 of each answer.
        assert (await send(n=2)).status == 200
        assert (await send(prompt=["abc", "ab"])).headers["x-ratelimit-limit-tokens"] == "60"
        second = await send()
        assert second.headers["x-ratelimit-remaining-tokens"] == str(60 - 13 - 15 - 8)
        engine.says = ["x" * 50]
        assert (await send(max_tokens=50)).status == 200
        refused = await send()
        assert "60 tokens per minute" in (await refusal_of(refused))["message"]
        assert refused.headers["Retry-After"] == str(89 - 60 + 1)
        clock.now += 30
        assert (await send()).status == 200


@run_async
async def test_requests_at_a_time(tmp_path):
    engine = EngineDouble(gate=asyncio.Event())
    async with client_of(engine, limited(tmp_path, max_concurrent=2)) as client:
        body = {**PROMPT, "stream": True}
        streams = [await client.post("/v1/completions", json=body, headers=KEY) for _ in range(2)]
        refused = await client.post("/v1/completions", json=PROMPT, headers=KEY)
        assert "2 requests run already" in (await refusal_of(refused))["message"]
        assert int(refused.headers["Retry-After"]) >= 1
        streams[0].close()
        await until(lambda: len(engine.running) == 1)
        engine.gate.set()
        await streams[1].text()
        assert (await client.post("/v1/completions", json=PROMPT, headers=KEY)).status == 200
