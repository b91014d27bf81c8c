"""Batch files: over HTTP, by OpenAI's client, and from the command line."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from llmjax.errors import InvalidRequestError
from llmjax_serving.batch_lines import read_lines
from llmjax_serving.batches import running_batches
from llmjax_serving.cli import main
from llmjax_serving.config import ServerConfig

from .double import EngineDouble, client_of, run_async, until

CHAT = "/v1/chat/completions"


def line(number: int, url: str = CHAT, **body) -> str:
    body = {"messages": [{"role": "user", "content": f"hi {number}"}], **body}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body})


@asynccontextmanager
async def batching(tmp_path, engine=None):
    config = ServerConfig(files_dir=str(tmp_path / "kept"))
    app = client_of(engine or EngineDouble(), config)
    async with app as client, running_batches(client.server.runner):
        yield client


def openai_client(client):
    openai = pytest.importorskip("openai")
    return openai.AsyncOpenAI(base_url=str(client.make_url("/v1")), api_key="none", max_retries=0)


async def ended(theirs, batch):
    for _ in range(200):
        batch = await theirs.batches.retrieve(batch.id)
        if batch.status in ("completed", "failed", "cancelled"):
            return batch
        await asyncio.sleep(0.02)
    raise AssertionError(batch)


@run_async
async def test_openais_client_has_a_file_answered(tmp_path):
    text = "\n".join([*map(line, range(5)), line(5, temperature=9)])
    async with batching(tmp_path) as client:
        theirs = openai_client(client)
        file = await theirs.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        assert (file.bytes, file.filename) == (len(text.encode()), "in.jsonl")
        batch = await theirs.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
        )
        batch = await ended(theirs, batch)
        assert batch.status == "completed" and batch.metadata == {"a": "b"}
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
        told = (await theirs.files.content(batch.output_file_id)).text
        answers = {a["custom_id"]: a["response"] for a in map(json.loads, told.splitlines())}
        assert answers.keys() == {f"r{i}" for i in range(5)}
        for answer in answers.values():
            assert answer["status_code"] == 200
            assert answer["body"]["choices"][0]["message"]["content"] == "Hello"
        failed = json.loads((await theirs.files.content(batch.error_file_id)).text)
        assert failed["custom_id"] == "r5" and failed["response"]["status_code"] == 400
        assert failed["response"]["body"]["error"]["param"] == "temperature"
        assert [b.id for b in (await theirs.batches.list()).data] == [batch.id]
        assert len((await theirs.files.list()).data) == 3
        assert (await theirs.files.delete(file.id)).deleted
        assert len((await theirs.files.list()).data) == 2


@run_async
async def test_a_batch_can_be_cancelled(tmp_path):
    engine = EngineDouble(says=["Hel", "lo"], gate=asyncio.Event())
    async with batching(tmp_path, engine) as client:
        theirs = openai_client(client)
        text = "\n".join(map(line, range(200))).encode()
        file = await theirs.files.create(file=("in.jsonl", text), purpose="batch")
        batch = await theirs.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        await until(lambda: len(engine.running) > 0)
        assert (await theirs.batches.cancel(batch.id)).status == "cancelling"
        engine.gate.set()
        batch = await ended(theirs, batch)
        assert batch.status == "cancelled"
        assert 0 < batch.request_counts.completed < 200


@run_async
async def test_what_a_restart_interrupts_has_failed(tmp_path):
    engine = EngineDouble(gate=asyncio.Event())
    async with batching(tmp_path, engine) as client:
        theirs = openai_client(client)
        file = await theirs.files.create(file=("in.jsonl", line(1).encode()), purpose="batch")
        batch = await theirs.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
    async with batching(tmp_path) as client:
        batch = await openai_client(client).batches.retrieve(batch.id)
        assert batch.status == "failed" and batch.errors.data[0].code == "interrupted"


@run_async
async def test_what_is_refused(tmp_path):
    async with batching(tmp_path) as client:
        for path in ("file-" + "0" * 32, "../secret", "%2e%2e%2fx", "batch-" + "0" * 32):
            for url in (f"/v1/files/{path}", f"/v1/files/{path}/content", f"/v1/batches/{path}"):
                assert (await client.get(url)).status == 404
        body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}
        assert (await client.post("/v1/batches", json=body)).status == 404
        for change in ({"endpoint": "/v1/models"}, {"completion_window": "1h"}, {"more": 1}):
            response = await client.post("/v1/batches", json={**body, **change})
            assert response.status == 400
            assert (await response.json())["error"]["param"] in change
        assert (await client.post("/v1/files", json={})).status == 415
        theirs = openai_client(client)
        file = await theirs.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        batch = await theirs.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        batch = await ended(theirs, batch)
        assert batch.status == "failed" and "line 1" in batch.errors.data[0].message
    async with client_of(EngineDouble()) as client:
        response = await client.get("/v1/files")
        assert response.status == 404 and "--files-dir" in await response.text()


@run_async
async def test_files_are_listed_in_pages(tmp_path):
    async with batching(tmp_path) as client:
        theirs = openai_client(client)
        made = [
            (await theirs.files.create(file=(f"{i}", b"{}"), purpose="batch")).id for i in range(3)
        ]
        up = [file.id async for file in theirs.files.list(order="asc", limit=2)]
        down = [file.id async for file in theirs.files.list(order="desc", limit=1)]
        assert up == down[::-1] and sorted(up) == sorted(made)
        assert not [file async for file in theirs.files.list(purpose="batch_output")]
        for url in ("/v1/files", "/v1/batches"):
            for query, param in (
                ("limit=0", "limit"),
                ("limit=" + "9" * 5000, "limit"),
                ("limit=\u0663", "limit"),
                ("order=up", "order"),
                ("order=asc&order=desc", "order"),
                ("after=file-x", "after"),
                ("before=x", "before"),
            ):
                answer = await client.get(f"{url}?{query}")
                assert answer.status == 400, query
                assert (await answer.json())["error"]["param"] == param


def test_lines_end_where_lines_of_json_do():
    """Other ends of lines, as str.splitlines knows them, are allowed in texts of JSON."""
    said = "a\u2028b\u0085c\x7fd"
    text = json.dumps(json.loads(line(1)) | {"custom_id": said}, ensure_ascii=False)
    first, second = read_lines(f"{text}\r\n{line(2)}")
    assert (first.custom_id, second.custom_id) == (said, "r2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests"),
        ("nonsense", "line 1: it is no JSON"),
        (line(1) + "\n[]", "line 2: it is no object"),
        (line(1) + "\n\n" + line(1), "line 3: the custom_id 'r1' is there twice"),
        (line(1, url="/v1/models"), "line 1: url is '/v1/models', allowed: /v1/chat"),
        (line(1, stream=True), "line 1: stream"),
        ('{"url": "/v1/completions", "body": {}}', "line 1: custom_id"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": 1}', "line 1: body"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions"}', "line 1: method"),
    ],
)
def test_lines_that_make_no_sense(text, message):
    with pytest.raises(InvalidRequestError, match=message):
        read_lines(text)


def test_the_command_line(tiny_model, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(i, max_tokens=3, temperature=0) for i in range(4)]
    source.write_text("\n".join([*lines, line(9, max_tokens=0)]))
    sizes = [
        "--token-buckets",
        "64",
        "--seq-buckets",
        "4",
        "--max-num-seqs",
        "4",
        "--max-model-len",
        "128",
    ]
    files = ["-i", str(source), "-o", str(target)]
    status = main(["run-batch", str(tiny_model), *files, *sizes, "--no-background"])
    assert status == 1 and "4 of 5 requests were answered" in capsys.readouterr().out
    answers = [json.loads(text) for text in target.read_text().splitlines()]
    codes = {a["custom_id"]: a["response"]["status_code"] for a in answers}
    assert codes == {"r0": 200, "r1": 200, "r2": 200, "r3": 200, "r9": 400}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        b"--b--\r\n",
        b"--b\r\n\r\nx\r\n--b--\r\n",
        b'--b\r\nContent-Disposition: form-data; name="\x08"\r\n\r\nx\r\n--b--\r\n',
        b'--b\r\nContent-Disposition: form-data; name="file"\r\nContent-Length: -1\r\n\r\nx',
        b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx',
        b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c--\r\n--b--\r\n",
        b"\xff" * 100,
    ],
)
@pytest.mark.parametrize("kind", ["multipart/form-data", "multipart/form-data; boundary=b"])
@run_async
async def test_forms_that_are_none_are_refused(tmp_path, kind, body):
    async with batching(tmp_path) as client:
        answer = await client.post("/v1/files", data=body, headers={"Content-Type": kind})
        assert answer.status == 400, await answer.text()
        assert (await client.get("/health")).status == 200
