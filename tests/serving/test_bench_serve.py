"""`llmjax bench serve` against servers that do as they are told."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from llmjax.bench import serve
from llmjax.bench.serve import Answer, Load, ServeResult, Target
from llmjax.errors import ConfigError
from llmjax_serving.cli import main

from .double import MODEL, EngineDouble, client_of, run_async

ENDPOINTS = (serve.COMPLETIONS, serve.CHAT)
PROBES = 3
"""Requests that find out what a server takes and how long its tokens are, before the others."""
LOAD = Load(num_prompts=6, max_concurrency=2, input_len=400, output_len=5)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@run_async
async def test_what_was_sent_and_what_came(endpoint, tmp_path, capsys):
    engine = EngineDouble(says=["H", "e", "llo"], max_model_len=10_000)
    report = tmp_path / "report.json"
    async with client_of(engine) as client:
        argv = ["bench", "serve", "--base-url", f"http://127.0.0.1:{client.port}/v1"]
        argv += ["--model", MODEL, "--endpoint", endpoint, "--output-json", str(report)]
        argv += ["--num-prompts", "6", "--max-concurrency", "2"]
        argv += ["--input-len", "400", "--output-len", "5"]
        assert await asyncio.to_thread(main, argv) == 0
    said = json.loads(report.read_text())
    assert (said["completed"], said["failed"], said["errors"]) == (6, 0, {})
    assert said["output_tokens"] == 6 * 5  # three pieces, but five tokens by the server's count
    assert said["endpoint"] == endpoint and said["max_concurrency"] == 2
    assert said["ttft_ms"].keys() == said["itl_ms"].keys() == {"mean", "p50", "p99"}
    assert said["output_tokens_per_second"] == pytest.approx(30 / said["seconds"])
    asked = engine.seen[-6:]
    assert all(params.max_tokens == 5 and params.ignore_eos for _, params in asked)
    assert len({tuple(ids) for ids, _ in asked}) == 6
    # Words are of many letters, and letters are its tokens.
    assert said["prompt_tokens"] / 6 == pytest.approx(400, rel=0.1)
    out = capsys.readouterr().out
    assert "completed                          6" in out and "to the first token" in out


async def stream(request: web.Request, *events: object) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for event in (*map(json.dumps, events), "[DONE]"):
        await response.write(f"data: {event}\n\n".encode())
    return response


async def measured(handler, load: Load = LOAD) -> dict:
    app = web.Application()
    app.router.add_post(serve.COMPLETIONS, handler)
    async with TestServer(app) as server:
        target = Target(str(server.make_url("")).rstrip("/"), serve.COMPLETIONS, "m")
        result = await asyncio.to_thread(serve.measure, target, load)
    return result.report()


def piece(text: str) -> dict:
    return {"choices": [{"text": text}]}


@run_async
async def test_a_server_that_refuses_extras_gets_none_and_pieces_are_counted():
    async def answer(request):
        if (await request.json()).keys() & {"ignore_eos", "stream_options"}:
            return web.json_response({"error": "unknown field"}, status=400)
        return await stream(request, piece("a"), piece(""), piece("b"), {"choices": []})

    said = await measured(answer)
    assert (said["completed"], said["output_tokens"], said["prompt_tokens"]) == (6, 12, 0)


@run_async
async def test_as_many_requests_run_as_were_asked_for():
    pair, count, running, most = asyncio.Barrier(2), 0, 0, 0

    async def answer(request):
        nonlocal count, running, most
        count, running = count + 1, running + 1
        most = max(most, running)
        if count > PROBES:
            await pair.wait()
        running -= 1
        return await stream(request, piece("a"))

    said = await measured(answer)
    assert (said["completed"], most) == (6, 2)


@run_async
async def test_tokens_without_text_count():
    async def answer(request):
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        return await stream(request, piece(""), {"choices": [], "usage": usage})

    said = await measured(answer)
    assert (said["completed"], said["output_tokens"], said["ttft_ms"]) == (6, 12, None)


@run_async
async def test_failures_are_told_apart_and_do_not_count():
    count = 0
    broken = (
        lambda request: web.Response(status=500, text="out of\npages"),
        lambda request: stream(request, piece("a"), {"error": {"message": "gone"}}),
        lambda request: stream(request, piece("")),
        lambda request: web.Response(text="data: <html>\n\n"),
        lambda request: stream(request, "text alone"),
    )

    async def answer(request):
        nonlocal count
        count += 1
        if count > PROBES + 2:
            reply = broken[count - PROBES - 3](request)
            return await reply if asyncio.iscoroutine(reply) else reply
        return await stream(request, piece("a"))

    said = await measured(answer, Load(7, max_concurrency=1, input_len=4, output_len=1))
    assert (said["completed"], said["failed"], said["output_tokens"]) == (2, 5, 2)
    assert sorted(said["errors"].values()) == [1] * 5
    assert {"HTTP 500: out of pages", "the answer has no tokens"} < said["errors"].keys()
    assert any("gone" in error for error in said["errors"])


@run_async
async def test_a_server_that_refuses_all_is_an_error_of_one_line(capsys):
    async with client_of(EngineDouble()) as client:
        url = f"http://127.0.0.1:{client.port}"
        argv = ["bench", "serve", "--base-url", url, "--model", "other"]
        assert await asyncio.to_thread(main, argv) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"llmjax: error: {url}/v1/completions does not answer: HTTP 404")
    assert "'other' does not exist" in err or '\\"other\\" does not exist' in err
    assert err.count("\n") == 1


def test_times_are_from_sending_and_between_pieces():
    answers = [Answer(sent=i, arrivals=[i + 0.1 * (i + 1), i + 2, i + 2.5]) for i in range(100)]
    said = ServeResult([*answers, Answer(error="no")], seconds=10).report()
    assert (said["completed"], said["failed"], said["output_tokens"]) == (100, 1, 300)
    assert (said["output_tokens_per_second"], said["requests_per_second"]) == (30, 10)
    assert said["ttft_ms"] == pytest.approx({"mean": 5050, "p50": 5000, "p99": 9900})
    assert said["itl_ms"]["p50"] == pytest.approx(500)


def test_a_report_of_failures_only():
    result = ServeResult([Answer(error="no")], seconds=1)
    assert result.report()["ttft_ms"] is None and result.report()["output_tokens"] == 0
    assert "1 failed: no" in result.table()


@run_async
async def test_lengths_beyond_the_servers_context_are_refused():
    seen = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        return await stream(request, {"choices": [{"text": "x"}]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 404}]})

    app = web.Application()
    app.router.add_post(serve.COMPLETIONS, handler)
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        target = Target(str(server.make_url("")).rstrip("/"), serve.COMPLETIONS, "m")
        said = r"input_len \+ output_len is 405, allowed: up to 404, as the context has 404 tokens"
        with pytest.raises(ConfigError, match=said):
            await asyncio.to_thread(serve.measure, target, LOAD)
    assert len(seen) == 1
