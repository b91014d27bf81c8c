"""`llmjax serve --api-server-count 2`: real processes, on a tiny model."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmjax.errors import ConfigError
from llmjax_serving.config import ServerConfig

from .conftest import KEY, Served
from .test_real_server import chunks, open_stream, wait_for

LONG = {"prompt": "The", "max_tokens": 200, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}}
POOLING = Path(__file__).parents[1] / "pooling" / "fixtures"
LIMITED = [
    {"name": "few", "key": "few", "requests_per_minute": 5, "tokens_per_minute": 60},
    {"name": "two", "key": "two", "max_concurrent": 2},
]


@pytest.fixture(scope="module")
def many(serve: Callable[..., Served], tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("many")
    (folder / "keys.json").write_text(json.dumps(LIMITED))
    files = ["--files-dir", str(folder / "files"), "--usage-db", str(folder / "usage.db")]
    return serve("--api-server-count", "2", "--api-key-file", str(folder / "keys.json"), *files)


def frontends(server: Served) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(server.process.pid).children():
        with suppress(psutil.Error):  # it has just ended
            if "llmjax_serving.frontends" in child.cmdline():
                found.append(child)
    return found


def is_of(process: psutil.Process, connection: http.client.HTTPConnection) -> bool:
    port = connection.sock.getsockname()[1]
    return any(c.raddr and c.raddr.port == port for c in process.net_connections())


class Client:
    """One connection, which is kept: all of it is answered by one frontend."""

    def __init__(self, server: Served):
        self.connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        self.call("GET", "/version")

    def send(self, method: str, path: str, body: Any = None, key: str = KEY) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        text = None if body is None else json.dumps(body)
        self.connection.request(method, path, text, headers)
        return self.connection.getresponse()

    def hold(self, key: str = KEY) -> None:
        """Sends a request but for its body, which is the client's to end."""
        self.connection.putrequest("POST", "/v1/completions")
        self.connection.putheader("Authorization", f"Bearer {key}")
        self.connection.putheader("Content-Type", "application/json")
        self.connection.putheader("Content-Length", "2")
        self.connection.endheaders()

    def call(self, method: str, path: str, body: Any = None, key: str = KEY) -> tuple[int, Any]:
        answer = self.send(method, path, body, key)
        raw = answer.read().decode()
        return answer.status, json.loads(raw) if raw.startswith("{") else raw


def one_at_each(server: Served) -> dict[int, Client]:
    """A client of each frontend, by its process."""
    clients: dict[int, Client] = {}
    processes = frontends(server)
    assert len(processes) == 2
    for _ in range(500):
        client = Client(server)
        (at,) = [one.pid for one in processes if is_of(one, client.connection)]
        clients.setdefault(at, client)
        if len(clients) == len(processes):
            return clients
    raise AssertionError("one of the frontends takes no connections")


def load_of(server: Served) -> int:
    """Requests at hand."""
    return server.call("/load")[1]["server_load"]


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every case with that server: healthy, and nothing left of the case."""
    yield
    if "many" in request.fixturenames:
        many = request.getfixturevalue("many")
        wait_for(lambda: len(frontends(many)) == 2 and many.call("/health")[0] == 200)
        wait_for(lambda: many.metric("num_requests_running") == 0)
        wait_for(lambda: many.metric("kv_cache_pages_used") == 0)
        wait_for(lambda: load_of(many) == 0)


COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "The engine reads", "temperature": 0, "max_tokens": 12},
    {"prompt": ["The", "She said"], "n": 3, "temperature": 1, "seed": 7, "max_tokens": 9},
    {"prompt": "The", "logprobs": 3, "echo": True, "temperature": 0, "max_tokens": 3},
    {"prompt": "She", "temperature": 0, "max_tokens": 24, "stop": ["m"], "ignore_eos": True},
    {"prompt": "The", "n": 3, "use_beam_search": True, "max_tokens": 6},
    {"prompt": "a", "structured_outputs": {"json": SCHEMA}, "temperature": 1, "seed": 1},
    {"prompt": "a", "structured_outputs": {"choice": ["left", "right"]}, "temperature": 0},
    {"prompt": "The", "logit_bias": {"70": 50}, "bad_words": ["mo"], "seed": -3},
    {"prompt": [5, 6, 7], "return_token_ids": True, "min_tokens": 3, "seed": 2**40},
    {"prompt": "a", "user": "u", "cache_salt": "s", "timeout": 60, "temperature": 0},
    {"prompt": "a", "structured_outputs": {"regex": "("}},
    {"prompt": "a", "structured_outputs": {"json": {"$ref": "#"}}},
    {"prompt": "a", "max_tokens": 256},
    {"prompt": "a", "priority": 3},
    {"prompt": [320]},
]


@pytest.mark.parametrize("body", COMPLETIONS, ids=lambda body: " ".join(map(str, body)))
def test_answers_are_those_of_one_process(server, many, body):
    def without_names(answer: dict[str, Any]) -> dict[str, Any]:
        # What the prefix cache has depends on the cases before.
        usage = {**answer.get("usage", {}), "prompt_tokens_details": None}
        return {**answer, "id": None, "created": None, "usage": usage}

    status, expected = server.call("/v1/completions", body)
    for client in one_at_each(many).values():
        told, answer = client.call("POST", "/v1/completions", body)
        assert (told, without_names(answer)) == (status, without_names(expected))
    if status == 200 and "logprobs" not in body and not body.get("use_beam_search"):
        _, response = open_stream(many, **body)
        texts: dict[int, str] = {}
        for choice in (choice for chunk in chunks(response) for choice in chunk["choices"]):
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert texts == {c["index"]: c["text"] for c in expected["choices"]}


def test_other_routes_are_answered_alike(server, many):
    chat = {"messages": [{"role": "user", "content": "Well?"}], "temperature": 0, "max_tokens": 8}
    message = {**chat, "model": "tiny"}
    asked = [
        ("/v1/chat/completions", chat, lambda a: a["choices"]),
        ("/v1/messages", message, lambda a: a["content"]),
        ("/v1/responses", {"input": "Well?", "temperature": 0, "max_output_tokens": 8}, texts_of),
        ("/tokenize", {"prompt": "The engine"}, lambda a: a),
        ("/v1/chat/completions/render", chat, lambda a: a),
    ]
    for path, body, part in asked:
        expected = part(server.call(path, body)[1])
        for client in one_at_each(many).values():
            assert part(client.call("POST", path, body)[1]) == expected
    for client in one_at_each(many).values():
        status, models = client.call("GET", "/v1/models")
        assert (status, models["data"][0]["id"]) == (200, "tiny")
        assert client.call("GET", "/v1/models", key="wrong")[0] == 401
        assert client.call("GET", "/metrics", key="wrong")[0] == 401
        answer = client.send("GET", "/usage?key=nobody")
        assert answer.getheader("X-Request-Id") and json.loads(answer.read())["data"] == []


def texts_of(response: dict[str, Any]) -> list[str]:
    return [part["text"] for item in response["output"] for part in item["content"]]


def test_what_is_stored_is_known_to_all(many):
    one, other = one_at_each(many).values()
    asked = {"input": "Well?", "max_output_tokens": 5}
    _, first = one.call("POST", "/v1/responses", asked)
    status, again = other.call("GET", f"/v1/responses/{first['id']}")
    assert (status, again["output"]) == (200, first["output"])
    status, _ = other.call("POST", "/v1/responses", {**asked, "previous_response_id": first["id"]})
    assert status == 200
    assert other.call("DELETE", f"/v1/responses/{first['id']}")[1]["deleted"]
    assert one.call("GET", f"/v1/responses/{first['id']}")[0] == 404


def test_a_batch_is_answered_once(many):
    one, other = one_at_each(many).values()
    lines = [
        {"custom_id": str(i), "url": "/v1/completions", "body": {"prompt": "The", "max_tokens": 2}}
        for i in range(5)
    ]
    part = "\r\n".join(
        [
            '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch',
            '--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n',
            "\n".join(map(json.dumps, lines)),
            "--b--\r\n",
        ]
    )
    headers = {"Content-Type": "multipart/form-data; boundary=b", "Authorization": f"Bearer {KEY}"}
    one.connection.request("POST", "/v1/files", part, headers)
    file = json.loads(one.connection.getresponse().read())
    before = many.metric("generation_tokens_total")
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
    _, batch = other.call("POST", "/v1/batches", {**asked, "completion_window": "24h"})
    path = f"/v1/batches/{batch['id']}"
    wait_for(lambda: one.call("GET", path)[1]["status"] == "completed")
    _, batch = one.call("GET", path)
    assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
    text = other.send("GET", f"/v1/files/{batch['output_file_id']}/content").read()
    assert sorted(json.loads(line)["custom_id"] for line in text.splitlines()) == list("01234")
    assert many.metric("generation_tokens_total") - before == 10


def test_what_is_counted_adds_up(many):
    names = ("generation_tokens_total", "prompt_tokens_total", "time_to_first_token_seconds_count")

    def counted() -> list[float]:
        rows = [row for row in many.call("/usage")[1]["data"] if row["key"] == "api-key-1"]
        used = [sum(row[name] for row in rows) for name in ("requests", "generated_tokens")]
        return [*map(many.metric, names), *used]

    before = counted()
    for client in one_at_each(many).values():
        for _ in range(3):
            body = {"prompt": [9, 10], "max_tokens": 4, "ignore_eos": True}
            assert client.call("POST", "/v1/completions", body)[0] == 200
    now = [after - earlier for after, earlier in zip(counted(), before, strict=True)]
    assert now == [24, 12, 6, 6, 24]


def test_limits_of_a_key_hold_for_all_together(many):
    clients = list(one_at_each(many).values())
    body, statuses, left = {"prompt": [9], "max_tokens": 1}, [], []
    for turn in range(8):
        answer = clients[turn % 2].send("POST", "/v1/completions", body, "few")
        answer.read()
        statuses.append(answer.status)
        left.append(int(answer.getheader("x-ratelimit-remaining-requests")))
    assert statuses == [200] * 5 + [429] * 3
    assert left == [4, 3, 2, 1, 0, 0, 0, 0]
    # Of each the prompt and the answer; a second brings one back.
    assert 50 <= int(answer.getheader("x-ratelimit-remaining-tokens")) < 60


def test_requests_at_a_time_are_those_of_all(many):
    def asks_in_vain() -> bool:
        return Client(many).call("POST", "/v1/completions", {"prompt": "a"}, "two")[0] == 429

    clients = one_at_each(many)
    for count, client in enumerate(clients.values(), 1):
        client.hold("two")
        # What asks before both have their places may take the second one's.
        wait_for(lambda count=count: load_of(many) == count)
    assert asks_in_vain()
    # One that dies holds no place.
    os.kill(next(iter(clients)), signal.SIGKILL)
    wait_for(lambda: len(frontends(many)) == 2 and not asks_in_vain())
    for client in clients.values():
        client.connection.close()


def test_a_client_that_leaves_frees_its_pages(many):
    before = many.metric("generation_tokens_total")
    for client in one_at_each(many).values():
        answer = client.send("POST", "/v1/completions", {**LONG, "n": 8, "stream": True})
        assert answer.readline()
        assert many.metric("kv_cache_pages_used") > 0
        client.connection.sock.close()
        answer.close()
        wait_for(lambda: many.metric("num_requests_running") == 0)
    assert many.metric("generation_tokens_total") - before < 2 * 8 * 200


def test_requests_that_are_cut_at_any_moment_leave_nothing_behind(serve, capfd):
    own = serve("--api-server-count", "2", "--log-level", "info")
    port, rng = int(own.url.rpartition(":")[2]), random.Random(0)

    async def ask(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = {"prompt": [9] * rng.randrange(1, 60), "max_tokens": rng.randrange(1, 60)}
        body |= {"stream": rng.random() < 0.5, "n": rng.randrange(1, 4), "ignore_eos": True}
        if rng.random() < 0.2:
            body["structured_outputs"] = {"regex": f"[ab]{{{number}}}"}
        text = json.dumps(body)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        writer.write((head + text).encode())
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.readuntil(b"never"), rng.random() * 2)
        writer.close()

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, range(1, 151)))

    asyncio.run(ask_all())
    wait_for(lambda: own.call("/load")[1]["server_load"] == 0)
    wait_for(lambda: own.metric("kv_cache_pages_used") == 0)
    assert own.metric("num_requests_waiting") == 0
    assert own.stop() == 0
    said = capfd.readouterr().err
    assert "for running requests: 0" in said
    assert "is killed" not in said and "Traceback" not in said


def test_a_frontend_that_dies_takes_its_requests_along_and_no_others(many):
    (doomed, victim), (_, other) = one_at_each(many).items()
    body = {**LONG, "stream": True}
    before = many.metric("generation_tokens_total")
    kept = other.send("POST", "/v1/completions", body)
    lost = victim.send("POST", "/v1/completions", {**body, "n": 7})
    assert kept.readline() and lost.readline()
    os.kill(doomed, signal.SIGKILL)
    with pytest.raises((http.client.HTTPException, OSError)):
        assert lost.read().endswith(b"[DONE]\n\n")
    assert b"data: [DONE]" in kept.read()
    wait_for(lambda: len(frontends(many)) == 2)
    assert doomed not in [one.pid for one in frontends(many)]
    one_at_each(many)  # the new one takes connections
    assert many.metric("generation_tokens_total") >= before


def test_sigterm_lets_streams_finish_and_leaves_no_process(serve, capfd):
    own = serve("--api-server-count", "2")
    processes = frontends(own)
    own.process.send_signal(signal.SIGINT)  # of a terminal, all processes get it
    for process in processes:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
    assert own.process.wait(30) == 0
    assert all(map(is_gone, processes))
    own = serve("--api-server-count", "2")
    processes, clients = frontends(own), one_at_each(own)
    body = {**LONG, "max_tokens": 150, "stream": True}
    held = Client(own)
    held.hold()
    streams = [client.send("POST", "/v1/completions", body) for client in clients.values()]
    assert all(stream.readline() for stream in streams)
    own.process.terminate()
    wait_for(lambda: own.call("/health")[0] == 503)
    assert own.call("/v1/completions", {"prompt": "a"})[0] == 503
    for stream in streams:
        *_, last = chunks(stream)
        assert last["choices"][0]["finish_reason"] == "length"
    assert own.process.poll() is None
    held.connection.send(b"{}")
    assert held.connection.getresponse().status == 503
    assert own.process.wait(30) == 0
    assert all(map(is_gone, processes))
    assert "is killed" not in capfd.readouterr().err  # each has ended by itself


def test_without_the_engines_process_clients_are_told_and_frontends_end(serve):
    own = serve("--api-server-count", "2")
    processes, clients = frontends(own), one_at_each(own)
    streams = [
        client.send("POST", "/v1/completions", {**LONG, "n": 4, "stream": True})
        for client in clients.values()
    ]
    assert all(stream.readline() for stream in streams)
    own.process.kill()
    for stream in streams:
        *_, last = [line for line in stream.read().decode().split("\n") if line]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead"
    wait_for(lambda: all(map(is_gone, processes)))


def test_frontends_that_die_again_and_again_end_the_server(serve):
    own = serve("--api-server-count", "2")

    def kill() -> bool:
        if (ended := own.process.poll()) is None:
            with suppress(psutil.Error):
                for process in frontends(own):
                    process.kill()
        return ended is not None

    deadline = time.monotonic() + 60
    while not kill() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert own.process.wait(30) == 1


def test_models_that_embed(serve):
    bert = str(POOLING / "bert")
    model = ["--model", bert, "--token-buckets", "128", "--max-queue-len", "64"]
    alone, many = serve(model=model), serve("--api-server-count", "2", model=model)
    asked = {"input": ["some text", "and another"]}
    _, expected = alone.call("/v1/embeddings", asked)
    for client in one_at_each(many).values():
        status, answer = client.call("POST", "/v1/embeddings", asked)
        assert (status, answer["usage"]) == (200, expected["usage"])
        for ours, theirs in zip(answer["data"], expected["data"], strict=True):
            assert ours["embedding"] == pytest.approx(theirs["embedding"], abs=1e-5)
        status, refused = client.call("POST", "/v1/completions", {"prompt": "a"})
        assert (status, refused["error"]["code"]) == (400, "unsupported_task")
        assert client.call("GET", "/health")[0] == 200
    assert many.stop() == 0


@pytest.mark.parametrize("number", [0, 65, "2"])
def test_a_number_that_makes_no_sense_is_refused(number):
    with pytest.raises(ConfigError, match=r"api_server_count is .*allowed"):
        ServerConfig(api_server_count=number)
