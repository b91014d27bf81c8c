"""Clients that stand still, send too much, or lie."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import socket
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from weakref import WeakSet

import aiohttp
import pytest

from llmjax.errors import ConfigError
from llmjax_serving.body_budget import BUDGET
from llmjax_serving.config import ServerConfig
from llmjax_serving.delivery import LEAST_BYTES, ReaderWatch

from .double import EngineDouble, client_of, run_async, until
from .test_server import running, send_signal

PROMPT = {"prompt": "a"}


def raw_request(body: dict, *, claimed: int = 0, extra: str = "") -> bytes:
    payload = json.dumps(body).encode()
    size = claimed or len(payload)
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}{extra}Content-Length: {size}\r\n\r\n".encode() + payload


async def send(url_of, raw: bytes):
    reader, writer = await asyncio.open_connection(url_of.host, url_of.port)
    writer.write(raw)
    return reader, writer


async def silent_socket(at, raw: bytes) -> socket.socket:
    """One that has sent a request and reads nothing."""
    loop, sock = asyncio.get_running_loop(), socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await loop.sock_connect(sock, (at.host, at.port))
    await loop.sock_sendall(sock, raw)
    return sock


@pytest.mark.parametrize("raw", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: a\r\nX"])
@run_async
async def test_headers_that_do_not_come_cost_no_connection(raw):
    async with running(EngineDouble, client_timeout=0.2) as (session, ready, task, _):
        await ready.wait()
        reader, writer = await send(session._base_url, raw)
        assert await reader.read() == b""
        writer.close()
        # And so do those of a second request, after one that was answered.
        reader, writer = await send(session._base_url, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.write(raw)
        assert b'{"status": "ok"}' in await reader.read()
        writer.close()
        send_signal()
        await task


@run_async
async def test_a_body_that_does_not_come_is_refused():
    engine = EngineDouble()
    async with client_of(engine, ServerConfig(client_timeout=0.2)) as client:
        reader, writer = await send(client, raw_request(PROMPT, claimed=1000))
        assert (await reader.readline()).split()[1] == b"408"
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Connection: close" in head and b"X-Request-Id: " in head
        writer.write(b"more of it" * 10)
        writer.close()
        assert not engine.seen and not client.state.active
        assert (await client.post("/v1/completions", json=PROMPT)).status == 200


@pytest.mark.parametrize("stream", [False, True])
@run_async
async def test_a_client_that_reads_nothing_is_cut_off(stream):
    size = 1 if stream else 20
    engine = EngineDouble(says=["x" * 100_000 * size] * 100, max_model_len=10**9)
    async with client_of(engine, ServerConfig(client_timeout=0.2)) as client:
        raw = raw_request({**PROMPT, "stream": stream, "max_tokens": 10**7})
        sock = await silent_socket(client, raw)
        await until(lambda: engine.pulled)
        await until(lambda: not engine.running and not client.state.active)
        await until(lambda: not client.server.handler.connections)
        sock.close()
        assert (await client.get("/health")).status == 200


@run_async
async def test_what_lies_unread_when_the_answer_has_ended_is_not_kept():
    engine = EngineDouble(says=["x" * 50_000] * 100, max_model_len=10**9)
    async with client_of(engine, ServerConfig(client_timeout=0.2)) as client:
        sock = await silent_socket(client, raw_request({**PROMPT, "max_tokens": 4_000_000}))
        await until(lambda: engine.pulled)
        await until(lambda: not client.server.handler.connections)
        sock.close()


@run_async
async def test_nothing_is_kept_of_a_connection_that_is_gone():
    engine = EngineDouble(says=["x" * 50_000] * 100, max_model_len=10**9)
    async with client_of(engine, ServerConfig(client_timeout=0.2)) as client:
        connections: WeakSet[Any] = WeakSet()
        for tokens in (1, 1000, 4_000_000):  # read, left with much unread, and cut off
            sock = await silent_socket(client, raw_request({**PROMPT, "max_tokens": tokens}))
            await until(lambda: client.server.handler.connections)
            [connection] = client.server.handler.connections
            connections.add(connection.transport)
            del connection
            if tokens < 4_000_000:
                await asyncio.get_running_loop().sock_recv(sock, 1000)
                sock.close()
            await until(lambda: not client.server.handler.connections)
            sock.close()
        await until(lambda: gc.collect() is None or not connections)


@run_async
async def test_who_reads_slowly_is_waited_for():
    state = SimpleNamespace(now=0.0, waiting=0, aborted=False)
    transport = Mock()
    transport.get_write_buffer_size = lambda: state.waiting
    transport.abort = lambda: setattr(state, "aborted", True)
    watches = {}
    writer = SimpleNamespace(output_size=0)
    request = SimpleNamespace(writer=writer, remote="me")
    watch = ReaderWatch(request, transport, 8, watches)
    watch._handle.cancel()
    watch._loop = SimpleNamespace(
        time=lambda: state.now, call_later=lambda *_: SimpleNamespace(cancel=lambda: None)
    )
    watch._moved = state.now

    def check(*, reads: int, writes: int = 0) -> bool:
        state.now += 2
        writer.output_size += writes
        state.waiting += writes - reads
        watch._check()
        return not state.aborted

    for _ in range(20):
        assert check(reads=0), "nothing is there to be read"
    for _ in range(20):
        assert check(writes=9 * LEAST_BYTES, reads=LEAST_BYTES)
    for _ in range(3):
        assert check(reads=0, writes=1)
    assert check(reads=LEAST_BYTES)
    assert all(check(reads=1) for _ in range(3))
    assert watches == {transport: watch}
    assert not check(reads=1)
    assert not watches


@pytest.mark.parametrize(
    "head",
    [
        "GET /health HTTP/1.1\r\n" + "X-A: b\r\n" * 200,
        "GET /health HTTP/1.1\r\nX-A: " + "b" * 10_000 + "\r\n",
        "GET /" + "a" * 10_000 + " HTTP/1.1\r\n",
        "GET /health HTTP/1.1\r\nX A: b\r\n",
        "GET /health HTTP/9.1\r\n",
        "\x00\x01\x02",
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n",
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n",
        "POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n",
    ],
)
@run_async
async def test_headers_that_are_too_many_too_large_or_wrong(head, caplog):
    async with running(EngineDouble) as (session, ready, task, _):
        await ready.wait()
        reader, writer = await send(session._base_url, f"{head}\r\n".encode())
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
        assert not [record for record in caplog.records if record.exc_info]
        async with session.get("/health") as response:
            assert response.status == 200
        send_signal()
        await task


@pytest.mark.parametrize(
    ("headers", "payload"),
    [
        ("Content-Encoding: gzip\r\nContent-Length: 9\r\n", b"not gzip!"),
        ("Content-Encoding: deflate\r\nContent-Length: 9\r\n", b"\x78\x9cno way!"),
        ("Transfer-Encoding: chunked\r\n", b"zz\r\nabc\r\n0\r\n\r\n"),
    ],
)
@run_async
async def test_bodies_that_cannot_be_decoded(headers, payload):
    async with client_of(EngineDouble()) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        reader, writer = await send(client, f"{head}{headers}\r\n".encode() + payload)
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
        assert (await client.post("/v1/completions", json=PROMPT)).status == 200


@run_async
async def test_a_body_that_grows_as_it_is_unpacked_is_too_large():
    raw = gzip.compress(json.dumps({"prompt": "a" * 10**7}).encode())
    assert len(raw) < 20_000
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with client_of(EngineDouble(), ServerConfig(max_body_bytes=10**6)) as client:
        response = await client.post("/v1/completions", data=raw, headers=headers)
        assert response.status == 413


@run_async
async def test_many_large_bodies_together_have_a_bound():
    """What has come counts, not what is promised, until the request has been answered."""
    config = ServerConfig(max_body_bytes=1000, max_total_body_bytes=1500)
    engine = EngineDouble(gate=asyncio.Event())
    large = {"prompt": "a" * 700}
    async with client_of(engine, config) as client:
        promised = [await send(client, raw_request(PROMPT, claimed=900)) for _ in range(3)]
        streamed = await client.post("/v1/completions", json={**large, "stream": True})
        assert streamed.status == 200
        budget = client.app[BUDGET]
        await until(lambda: 700 < budget.used < 1000)
        waits = [await send(client, raw_request(large, claimed=900))]
        await until(lambda: budget.used > 1400)
        refused = await client.post("/v1/completions", json=large)
        error = (await refused.json())["error"]
        assert (refused.status, error["code"]) == (503, "bodies_full")
        assert "1500 bytes (--max-total-body-bytes)" in error["message"]
        assert refused.headers["Retry-After"]
        assert (await client.post("/v1/completions", json={"prompt": "a" * 1000})).status == 413
        engine.gate.set()
        await streamed.read()
        await until(lambda: budget.used < 800)
        assert (await client.post("/v1/completions", json=large)).status == 200
        for _, writer in [*promised, *waits]:
            writer.close()
        await until(lambda: not budget.used)


@run_async
async def test_uploads_count_too(tmp_path):
    config = ServerConfig(
        max_body_bytes=1000, max_total_body_bytes=1000, files_dir=str(tmp_path / "files")
    )
    async with client_of(EngineDouble(), config) as client:
        for size, status in ((500, 200), (1500, 413), (500, 200)):
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", b"x" * size, filename="a.jsonl")
            assert (await client.post("/v1/files", data=form)).status == status


def test_a_budget_holds_one_body_at_least():
    with pytest.raises(ConfigError, match="max_total_body_bytes is 999, allowed: 1000 to"):
        ServerConfig(max_body_bytes=1000, max_total_body_bytes=999)
