"""What a request is called: in every answer, and in the log."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime, timedelta

import pytest

from llmjax_serving.config import ServerConfig

from .double import EngineDouble, client_of, run_async, until
from .test_server import running, send_signal

PROMPT = {"prompt": "a"}


@run_async
async def test_every_answer_says_what_the_request_is_called():
    config = ServerConfig(api_key=("k",), max_body_bytes=1000)
    headers = {"X-Request-Id": "my-id/1", "Authorization": "Bearer k"}
    wanted = [
        (200, "POST", "/v1/completions", PROMPT, headers),
        (200, "POST", "/v1/completions", {**PROMPT, "stream": True}, headers),
        (400, "POST", "/v1/completions", {}, headers),
        (413, "POST", "/v1/completions", {"prompt": "a" * 1000}, headers),
        (401, "POST", "/v1/completions", PROMPT, {"X-Request-Id": "my-id/1"}),
        (404, "GET", "/nowhere", None, headers),
        (405, "GET", "/v1/completions", None, headers),
        (204, "OPTIONS", "/v1/completions", None, {"X-Request-Id": "my-id/1"}),
        (200, "GET", "/health", None, headers),
        (200, "GET", "/dashboard", None, headers),
    ]
    engine = EngineDouble()
    async with client_of(engine, config) as client:
        for status, method, url, body, head in wanted:
            response = await client.request(method, url, json=body, headers=head)
            assert (response.status, response.headers["X-Request-Id"]) == (status, "my-id/1")
        odd = await client.get("/health", headers={**headers, "Expect": "the impossible"})
        assert (odd.status, odd.headers["X-Request-Id"]) == (417, "my-id/1")
        engine.fails = KeyError("secret")
        failed = await client.post("/v1/completions", json=PROMPT, headers=headers)
        assert (failed.status, failed.headers["X-Request-Id"]) == (500, "my-id/1")


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", 'a"b', "<script>", "a\tb", "a;b"])
@run_async
async def test_what_could_do_harm_is_replaced(given):
    async with client_of(EngineDouble()) as client:
        names = set()
        for _ in range(2):
            response = await client.get("/health", headers={"X-Request-Id": given})
            names.add(response.headers["X-Request-Id"])
        assert len(names) == 2 and all(len(name) == 32 for name in names)


@run_async
async def test_an_error_in_the_log_names_its_request(caplog):
    async with client_of(EngineDouble(fails=KeyError("x"))) as client:
        for name in ("one", "two"):
            await client.post("/v1/completions", json=PROMPT, headers={"X-Request-Id": name})
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "request one failed",
        "request two failed",
    ]


@pytest.mark.parametrize("log_format", ["text", "json"])
@run_async
async def test_the_access_log(log_format, caplog):
    caplog.set_level("INFO", "llmjax_serving.access")
    engine = EngineDouble(gate=asyncio.Event())
    config = {"access_log_format": log_format, "api_key": ("k",)}
    headers = {"X-Request-Id": "it", "Authorization": "Bearer k"}
    async with running(lambda: engine, **config) as (session, ready, task, _):
        await ready.wait()
        async with session.get("/v1/models?a=%22%0A", headers=headers) as response:
            assert response.status == 200
        async with session.get("/health") as response:
            assert response.status == 200
        await until(lambda: len(caplog.records) == 1)
        async with session.get("/v1/models") as response:
            assert response.status == 401
        await until(lambda: len(caplog.records) == 2)
        send_signal()
        await task
    first, second = (record.message for record in caplog.records if "access" in record.name)
    if log_format == "text":
        assert first.startswith("127.0.0.1 GET /v1/models?a=%22%0A 200 0.")
        assert first.endswith(" s, key api-key-1, request it")
        return
    line = json.loads(first)
    assert datetime.fromisoformat(line.pop("time")).utcoffset() == timedelta(0)
    assert line.pop("seconds") >= 0 and line.pop("bytes") > 0
    assert line == {
        "remote": "127.0.0.1",
        "method": "GET",
        "path": "/v1/models?a=%22%0A",
        "status": 200,
        "key": "api-key-1",
        "request_id": "it",
    }
    refused = json.loads(second)
    assert (refused["status"], refused["key"], len(refused["request_id"])) == (401, None, 32)
