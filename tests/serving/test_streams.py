"""Clients that leave or do not read, and errors in the middle of a stream."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from llmjax.errors import EngineDeadError

from .double import EngineDouble, client_of, events, run_async, until

COMPLETION = ("/v1/completions", {"prompt": "a"})
BATCH = ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})


async def connect(client, url, body):
    """A request by hand, on a socket that the test can drop."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    payload = json.dumps(body).encode()
    head = f"POST {url} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize(("url", "body"), [COMPLETION, BATCH, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@run_async
async def test_a_client_that_leaves_stops_its_request(url, body, stream, caplog):
    engine = EngineDouble(gate=asyncio.Event())
    async with client_of(engine) as client:
        _, writer = await connect(client, url, {**body, "stream": stream})
        prompts = body.get("prompt", "a")
        expected = len(prompts) if isinstance(prompts, list) else 1
        await until(lambda: len(engine.running) == expected)
        writer.close()
        await until(lambda: not engine.running)
        await until(lambda: not client.state.active)
        text = await (await client.get("/metrics")).text()
        choices = expected * body.get("n", 1)
        aborted = (
            'llmjax:request_success_total{engine="0",finished_reason="abort",model_name="double"}'
        )
        assert f"{aborted} {float(choices)}" in text.splitlines()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@run_async
async def test_a_client_that_leaves_while_it_is_written_to_is_no_error(caplog):
    engine = EngineDouble(says=["x" * 1000] * 100_000, max_model_len=10**9)
    async with client_of(engine) as client:
        url, body = COMPLETION
        body = {**body, "stream": True, "max_tokens": 10**8}
        reader, writer = await connect(client, url, body)
        await reader.readline()
        writer.transport.abort()
        await until(lambda: not engine.running)
        await until(lambda: not client.state.active)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(("url", "body"), [COMPLETION, BATCH, CHAT])
@pytest.mark.parametrize("error", [EngineDeadError("the step failed"), ValueError("secret")])
@run_async
async def test_an_error_in_the_middle_is_an_event(url, body, error):
    engine = EngineDouble(fails=error, fails_at=1)
    async with client_of(engine) as client:
        response = await client.post(url, json={**body, "stream": True})
        assert response.status == 200
        *chunks, last = events(await response.text())
        assert chunks
        told = json.loads(last)["error"]
        assert told["type"] == "server_error"
        assert ("the step failed" in told["message"]) == isinstance(error, EngineDeadError)
        assert "secret" not in told["message"]
        await until(lambda: not engine.running)
        engine.fails = None
        assert (await client.post(url, json=body)).status == 200


@run_async
async def test_a_request_the_engine_aborts_is_an_error_not_an_answer():
    engine = EngineDouble(says=["a", "b"], ends="abort")
    async with client_of(engine) as client:
        url, body = COMPLETION
        whole = await client.post(url, json=body)
        assert whole.status == 503
        assert (await whole.json())["error"]["code"] == "aborted"
        streamed = await client.post(url, json={**body, "stream": True})
        assert json.loads(events(await streamed.text())[-1])["error"]["code"] == "aborted"


@run_async
async def test_nothing_piles_up_for_a_client_that_does_not_read():
    piece = "x" * 1000
    engine = EngineDouble(says=[piece] * 100_000, max_model_len=10**9)
    async with client_of(engine) as client:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, (client.host, client.port))
            url, body = COMPLETION
            payload = json.dumps({**body, "stream": True, "max_tokens": 10**8}).encode()
            head = f"POST {url} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            raw = f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload
            await asyncio.get_running_loop().sock_sendall(sock, raw)
            await until(lambda: engine.pulled)
            before = 0
            while engine.pulled != before:
                before = engine.pulled
                await asyncio.sleep(0.3)
            # What was pulled lies in the buffers of two sockets; the rest was not asked for.
            assert 0 < engine.pulled < 20_000
            assert (await client.get("/health")).status == 200
        await until(lambda: not engine.running)
