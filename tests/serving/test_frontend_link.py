"""What goes between a frontend and the engine's process, in one process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

import msgpack
import pytest

from llmjax import RequestOptions, SamplingParams, StructuredOutputs
from llmjax.errors import (
    EngineDeadError,
    InvalidRequestError,
    LlmjaxError,
    QueueFullError,
    RequestFailedError,
    ShutdownError,
)
from llmjax.metrics import Metrics
from llmjax.request import FinishReason, Request, SequenceDelta, TokenLogprobs
from llmjax.structured_outputs import Reasoning
from llmjax_serving.errors import ApiError
from llmjax_serving.frontends.link import Link
from llmjax_serving.frontends.wire import (
    delta_in,
    delta_out,
    error_in,
    error_out,
    request_in,
    request_out,
)

from .double import run_async, until

FULL = SamplingParams(
    n=3,
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=-1,
    frequency_penalty=0.5,
    seed=-(2**63),
    max_tokens=None,
    min_tokens=2,
    stop=["ä", "b"],
    stop_token_ids=[3],
    ignore_eos=True,
    logprobs=2,
    prompt_logprobs=0,
    logit_bias={5: -1.5},
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    kept_special_ids=(1,),
    structured_outputs=StructuredOutputs(
        json={"type": "object"}, after=Reasoning("<a>", "</a>", True), asked_as="response_format"
    ),
    allowed_token_ids=(1, 2),
    bad_words=["no"],
    thinking_token_budget=9,
    reasoning=Reasoning("<a>", "</a>", False),
)
OPTIONS = RequestOptions(priority=-(2**63), cache_salt="s", user="u", timeout=1.5, queue_timeout=2)


def carried(value: Any) -> Any:
    """As it comes out at the other end of a link."""
    return msgpack.unpackb(msgpack.packb(value), use_list=False, strict_map_key=False)


def test_the_full_request_of_these_tests_has_nothing_as_by_default():
    plain, apart = SamplingParams(), {"detokenize"}  # excludes stop strings
    assert {f.name for f in fields(plain) if getattr(plain, f.name) == getattr(FULL, f.name)} == (
        apart
    )


@pytest.mark.parametrize(
    ("params", "options"),
    [
        (FULL, OPTIONS),
        (SamplingParams(), RequestOptions()),
        (SamplingParams(detokenize=False), OPTIONS),
    ],
)
def test_requests_arrive_as_they_were_sent(params, options):
    sent = Request("7", [1, 2, 2**31], params, options=options)
    got = request_in("3-", frozenset({2}), *carried(request_out(sent)))
    assert (got.id, got.eos_token_ids) == ("3-7", frozenset({2}))
    for name in ("prompt_token_ids", "params", "options", "arrival_time"):
        assert getattr(got, name) == getattr(sent, name)
    assert type(got.prompt_token_ids) is list
    wanted = params.structured_outputs
    if wanted is not None:
        assert got.params.structured_outputs.asked_as == wanted.asked_as


def test_deltas_arrive_as_they_were_sent():
    rows = [TokenLogprobs(4, -0.5, 1, (4, 5), (-0.5, float("-inf")))]
    request = Request("3-7", [1], SamplingParams(), engine=2, began=1.5)
    error = QueueFullError("full", retry_after=9)
    for delta in (
        SequenceDelta("3-7", 1, [4, 5], rows * 2, rows, FinishReason.STOP, "end", 11, error),
        SequenceDelta("3-7", 0, [4], [], stop_reason=5),
    ):
        got, engine, began = delta_in(carried(delta_out(delta, "7", request)))
        assert (engine, began) == (2, 1.5)
        assert got.error is None or (str(got.error), got.error.retry_after) == ("full", 9)
        delta.request_id, delta.error, got.error = "7", None, None
        assert got == delta
        assert got.finish_reason is None or got.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("no", param="prompt", code="c"),
        QueueFullError("no", retry_after=4),
        ShutdownError("no"),
        ApiError(429, "no", code="rate_limit_exceeded", headers={"Retry-After": "3"}),
    ],
)
def test_errors_arrive_as_they_were_sent(error):
    got = error_in(carried(error_out(error)))
    assert type(got) is type(error) and str(got) == str(error)
    assert vars(got) == vars(error)


def test_an_error_that_nobody_thought_of_is_the_engines_failure():
    got = error_in(carried(error_out(ZeroDivisionError("division by zero"))))
    assert type(got) is RequestFailedError and "ZeroDivisionError" in str(got)


@asynccontextmanager
async def linked(handlers, others=None):
    lost, socks = [], socket.socketpair()
    one = await Link.over(socks[0], others or {}, lambda: lost.append("one"))
    other = await Link.over(socks[1], handlers, lambda: lost.append("other"))
    yield one, other, lost
    for link in (one, other):
        link.close()
    await until(lambda: sorted(lost) == ["one", "other"])


@run_async
async def test_calls_are_answered_each_with_its_own_and_fail_with_what_failed():
    async def slow(number):
        await asyncio.sleep(0.01 * (5 - number))
        if number == 3:
            raise InvalidRequestError("three", param="number")
        return [number, b"bytes", {"a": None}]

    async with linked({"slow": slow, "now": lambda: 1}) as (one, _, _):
        asked = [one.call("slow", number) for number in range(5)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(answers.pop(3), InvalidRequestError)
        assert answers == [(number, b"bytes", {"a": None}) for number in (0, 1, 2, 4)]
        assert await one.call("now") == 1


@run_async
async def test_what_is_told_comes_in_order_and_a_bad_message_alone_is_lost(caplog):
    told = []
    async with linked({"take": lambda number: told.append(1 // number)}) as (one, _, _):
        for number in (1, 0, 1):
            one.tell("take", number)
        one.tell("nothing of that name")
        one.tell("take", 1)
        await until(lambda: len(told) == 3)
    assert caplog.text.count("could not be taken") == 2


@run_async
async def test_a_call_that_is_cancelled_is_taken_back():
    began, ended = asyncio.Event(), asyncio.Event()

    async def forever():
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with linked({"forever": forever}) as (one, _, _):
        asking = asyncio.ensure_future(one.call("forever"))
        await began.wait()
        asking.cancel()
        await ended.wait()


@run_async
async def test_when_the_other_side_goes_those_who_wait_are_told():
    async def forever():
        await asyncio.Event().wait()

    async with linked({"forever": forever}) as (one, other, lost):
        asking = asyncio.ensure_future(one.call("forever"))
        await asyncio.sleep(0)
        other.close()
        with pytest.raises(EngineDeadError):
            await asking
        await until(lambda: "one" in lost)
        with pytest.raises(LlmjaxError):
            await one.call("forever")
        one.tell("forever")  # to nobody


def test_metrics_of_other_processes_are_added_in():
    here, there = Metrics("m"), Metrics("m")
    Metrics("m", 1, beside=here)
    second = Metrics("m", 1, beside=there)
    here.prompt_tokens.inc(2)
    here.count_finished("stop")
    there.prompt_tokens.inc(3)
    second.prompt_tokens.inc(40)
    there.time_to_first_token.observe(0.03)
    there.count_finished("length")
    here.take("a", carried(there.tell()))
    here.take("b", carried(there.tell()))
    there.prompt_tokens.inc(100)
    here.take("b", carried(there.tell()))
    assert here.totals(0)["prompt_tokens_total"] == 2 + 3 + 103
    assert here.totals()["prompt_tokens_total"] == 108 + 80
    assert here.totals()["time_to_first_token_seconds_count"] == 2
    samples = {
        (s.name.removeprefix("llmjax:"), s.labels.get("finished_reason") or s.labels.get("le")): s
        for family in here.collect()
        for s in family.samples
        if s.labels["engine"] == "0"
    }
    assert samples["request_success_total", "stop"].value == 1
    assert samples["request_success_total", "length"].value == 2
    assert samples["request_success_total", "length"].labels["model_name"] == "m"
    assert samples["time_to_first_token_seconds_bucket", "0.04"].value == 2
    assert samples["time_to_first_token_seconds_bucket", "0.02"].value == 0


def test_a_frontend_does_without_jax(environment):
    code = "import sys, llmjax_serving.frontends.worker; print('jax' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
