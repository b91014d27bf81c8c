"""A server's life: binding, loading, readiness, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from contextlib import asynccontextmanager, closing

import aiohttp
import pytest

from llmjax.errors import ConfigError, ModelNotFoundError
from llmjax_serving.config import ServerConfig
from llmjax_serving.listen import bind
from llmjax_serving.server import Server
from llmjax_serving.state import ServerState

from .double import MODEL, EngineDouble, events, run_async, until

PROMPT = {"prompt": "a"}


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as sock:
        return sock.getsockname()[1]


@asynccontextmanager
async def running(load, **config):
    """A `Server` whose `run` goes on beside the test, and a session that talks to it."""
    port = free_port()
    state = ServerState(MODEL, ServerConfig(**{"port": port, **config}))
    ready = asyncio.Event()
    server = Server(state, load, lambda engine, url: ready.set())
    task = asyncio.ensure_future(server.run())
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        yield session, ready, task, state
    assert task.done()


def send_signal() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@run_async
async def test_the_port_answers_before_the_model_is_there():
    go, loading, engine = threading.Event(), threading.Event(), EngineDouble()

    def load():
        loading.set()
        go.wait(10)
        return engine

    async with running(load) as (session, ready, task, _):
        await until(loading.is_set)
        async with session.get("/health") as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "loading"
        go.set()
        await ready.wait()
        async with session.get("/health") as response:
            assert response.status == 200
        send_signal()
        assert await task == 0
        assert engine.stopped


@run_async
async def test_a_signal_ends_a_server_that_still_loads():
    go, loading = threading.Event(), threading.Event()

    def load():
        loading.set()
        go.wait(10)
        return EngineDouble()

    async with running(load) as (_, ready, task, _):
        await until(loading.is_set)
        send_signal()
        assert await task == 0
        assert not ready.is_set()
        go.set()


@run_async
async def test_a_model_that_does_not_load_ends_the_server():
    def load():
        raise ModelNotFoundError("no such model")

    async with running(load) as (_, _, task, _):
        with pytest.raises(ModelNotFoundError, match="no such model"):
            await task


@run_async
async def test_a_taken_port_is_refused_before_anything_is_loaded():
    def load():
        raise AssertionError("the model was loaded")

    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        state = ServerState(MODEL, ServerConfig(port=port))
        with pytest.raises(ConfigError, match=f"port {port}: .*in use"):
            await Server(state, load, lambda engine, url: None).run()


def test_a_port_that_cannot_be_had_leaves_no_socket_open(monkeypatch):
    opened = []

    class Remembered(socket.socket):
        def __init__(self, *args):
            super().__init__(*args)
            opened.append(self)

    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        monkeypatch.setattr(socket, "socket", Remembered)
        with pytest.raises(ConfigError, match="in use"):
            bind(ServerConfig(port=other.getsockname()[1]))
    assert [sock.fileno() for sock in opened] == [-1]


@run_async
async def test_sigterm_lets_streams_finish_and_takes_no_new_ones(caplog):
    caplog.set_level("INFO", "llmjax_serving.server")
    engine = EngineDouble(gate=asyncio.Event())
    async with running(lambda: engine, shutdown_timeout=10) as (session, ready, task, state):
        await ready.wait()
        streams = [
            await session.post("/v1/completions", json={**PROMPT, "stream": True}) for _ in range(4)
        ]
        send_signal()
        await until(lambda: state.draining)
        async with session.post("/v1/completions", json=PROMPT) as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
            assert (await response.json())["error"]["code"] == "shutting_down"
        async with session.get("/health") as response:
            assert response.status == 503
        engine.gate.set()
        for response in streams:
            assert events(await response.text())[-1] == "[DONE]"
        assert await task == 0
    assert "waiting up to 10 s for running requests: 4" in caplog.messages
    assert "all of them have ended" in caplog.messages


@run_async
async def test_streams_that_outlast_the_timeout_are_told(caplog):
    engine = EngineDouble(gate=asyncio.Event())
    async with running(lambda: engine, shutdown_timeout=0.1) as (session, ready, task, _):
        await ready.wait()
        response = await session.post("/v1/completions", json={**PROMPT, "stream": True})
        send_signal()
        error = json.loads(events(await response.text())[-1])["error"]
        assert error["code"] == "shutting_down"
        assert await task == 0
    assert "requests cut off: 1" in caplog.messages


@run_async
async def test_a_second_signal_aborts(caplog):
    engine = EngineDouble(gate=asyncio.Event())
    async with running(lambda: engine, shutdown_timeout=1000) as (session, ready, task, state):
        await ready.wait()
        streams = [
            await session.post("/v1/completions", json={**PROMPT, "stream": True}) for _ in range(2)
        ]
        whole = asyncio.ensure_future(session.post("/v1/completions", json=PROMPT))
        await until(lambda: len(engine.running) == 3)
        send_signal()
        await until(lambda: state.draining)
        assert not task.done()
        send_signal()
        for response in streams:
            error = json.loads(events(await response.text())[-1])["error"]
            assert error["code"] == "shutting_down"
        assert (await whole).status == 503
        assert (await (await whole).json())["error"]["code"] == "shutting_down"
        assert await task == 1
        assert engine.stopped
    assert "requests cut off: 3" in caplog.messages


@run_async
async def test_a_dead_engine_ends_the_server():
    engine = EngineDouble(dead="the engine has stopped: out of memory")
    async with running(lambda: engine) as (_, ready, task, _):
        await ready.wait()
        engine.ended.set()
        assert await task == 1
