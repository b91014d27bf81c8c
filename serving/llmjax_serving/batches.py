"""/v1/batches: files of requests, answered one after the other beside what else is asked."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
from aiohttp import web

from llmjax.errors import InvalidRequestError

from .batch_lines import ENDPOINTS, Answered, Line, ask_all, read_lines
from .body import read_json
from .errors import ApiError
from .files import FILES, PAGE, Folder, files_of, new_file
from .formatter import JsonObject
from .owner import owner_of
from .paging import page, query
from .private_site import BASE, private_session
from .schema.fields import Field, Parse, described, mapping, only, read, refuse, text
from .state import STATE

logger = logging.getLogger(__name__)

AT_ONCE = 64
"""Requests of a batch that are under way at a time."""
_CREDENTIALS = ("Authorization", "x-api-key")
_OVER = ("completed", "failed", "cancelled", "expired")


@described({"enum": list(ENDPOINTS)})
def endpoint(value: Any, path: str) -> str:
    if value not in ENDPOINTS:
        raise refuse(path, value, ", ".join(ENDPOINTS))
    return value


FIELDS: dict[str, Field] = {
    "input_file_id": Field(text, required=True),
    "endpoint": Field(endpoint, required=True),
    "completion_window": Field(only("24h"), required=True),
    "metadata": Field(mapping),
}
NO_OPS: dict[str, Parse] = {"output_expires_after": only()}  # files stay until they are deleted


class Batches:
    """The batches of a server.

    A batch's requests are sent with the key of who made it, which is kept in memory only: what a
    restart interrupts has failed.
    """

    def __init__(self, folder: Folder, files: Folder):
        self.folder, self._files = folder, files
        self._waiting: asyncio.Queue[tuple[str, dict[str, str]]] = asyncio.Queue()
        self._cancelled: set[str] = set()
        for record in folder.list(None):
            if record["status"] not in _OVER:
                fault = {"code": "interrupted", "message": "the server was restarted meanwhile"}
                self._end(record, "failed", errors={"object": "list", "data": [fault]})

    def add(self, record: JsonObject, owner: str, credentials: dict[str, str]) -> None:
        self.folder.put(record, owner)
        self._waiting.put_nowait((record["id"], credentials))

    def cancel(self, record: JsonObject) -> JsonObject:
        if record["status"] not in (*_OVER, "cancelling"):
            self._cancelled.add(record["id"])
            record |= {"status": "cancelling", "cancelling_at": int(time.time())}
            self._put(record)
        return record

    async def work(self, session: aiohttp.ClientSession) -> None:
        """Answers batches, for ever."""
        while True:
            batch_id, credentials = await self._waiting.get()
            with suppress(ApiError):  # it may be gone
                record = self.folder.get(batch_id, None)
                try:
                    await self._run(record, credentials, session)
                except Exception as error:
                    logger.exception("batch %s failed", batch_id)
                    fault = {"code": "internal_error", "message": type(error).__name__}
                    self._end(record, "failed", errors={"object": "list", "data": [fault]})
            self._cancelled.discard(batch_id)

    async def _run(
        self, record: JsonObject, credentials: dict[str, str], session: aiohttp.ClientSession
    ) -> None:
        owner = self.folder.owner(record["id"])
        try:
            content = self._files.content(record["input_file_id"]).read_text(encoding="utf-8")
            lines = read_lines(content, record["endpoint"])
        except (InvalidRequestError, OSError, UnicodeDecodeError) as error:
            fault = {"code": getattr(error, "code", None) or "invalid_file", "message": str(error)}
            self._end(record, "failed", errors={"object": "list", "data": [fault]})
            return
        record |= {"status": "in_progress", "in_progress_at": int(time.time())}
        record["request_counts"]["total"] = len(lines)
        self._put(record)
        answers = await self._answer(record, lines, credentials, session)
        record |= {"status": "finalizing", "finalizing_at": int(time.time())}
        for name, failed in (("output_file_id", False), ("error_file_id", True)):
            told = [json.dumps(a.as_dict()) for a in answers if a.failed is failed]
            if told:
                data = "".join(f"{line}\n" for line in told).encode()
                kind = name.removesuffix("_file_id")
                file = new_file(
                    self._files, f"{record['id']}_{kind}.jsonl", "batch_output", data, owner
                )
                record[name] = file["id"]
        self._end(record, "cancelled" if record["id"] in self._cancelled else "completed")

    async def _answer(
        self,
        record: JsonObject,
        lines: list[Line],
        credentials: dict[str, str],
        session: aiohttp.ClientSession,
    ) -> list[Answered]:
        answers, counts, told = [], record["request_counts"], time.monotonic()
        stream = ask_all(
            session,
            BASE,
            lines,
            at_once=AT_ONCE,
            headers=credentials,
            is_cancelled=lambda: record["id"] in self._cancelled,
        )
        async for answer in stream:
            answers.append(answer)
            counts["failed" if answer.failed else "completed"] += 1
            if time.monotonic() - told > 1:
                told = time.monotonic()
                self._put(record)
        return answers

    def _put(self, record: JsonObject) -> None:
        if record["id"] in self._cancelled and record["status"] == "in_progress":
            record["status"] = "cancelling"
        self.folder.put(record, self.folder.owner(record["id"]))

    def _end(self, record: JsonObject, status: str, **more: Any) -> None:
        record |= {"status": status, f"{status}_at": int(time.time()), **more}
        self._put(record)


BATCHES = web.AppKey("batches", Batches)


@asynccontextmanager
async def running_batches(runner: web.AppRunner) -> AsyncIterator[None]:
    """Answers batches meanwhile, where the app of a runner keeps files."""
    batches = runner.app.get(BATCHES)
    if batches is None:
        yield
        return
    async with private_session(runner) as session:
        working = asyncio.ensure_future(batches.work(session))
        try:
            yield
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working


def batches_of(request: web.Request) -> Batches:
    files_of(request)  # which says how there are some
    return request.app[BATCHES]


async def create_batch(request: web.Request) -> web.Response:
    batches, owner = batches_of(request), owner_of(request)
    asked = read(read_json(request), FIELDS, NO_OPS)
    request.app[FILES].get(asked["input_file_id"], owner)
    record: JsonObject = {
        "id": batches.folder.new_id(),
        "object": "batch",
        "endpoint": asked["endpoint"],
        "errors": None,
        "input_file_id": asked["input_file_id"],
        "completion_window": asked["completion_window"],
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": int(time.time()),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": asked["metadata"],
    }
    sent = {name: request.headers[name] for name in _CREDENTIALS if name in request.headers}
    batches.add(record, owner, sent)
    return web.json_response(record)


async def list_batches(request: web.Request) -> web.Response:
    folder, asked = batches_of(request).folder, query(request, PAGE)
    found = await request.app[STATE].in_thread(folder.list, owner_of(request))
    return web.json_response(page(found, asked))


async def show_batch(request: web.Request) -> web.Response:
    folder = batches_of(request).folder
    return web.json_response(folder.get(request.match_info["id"], owner_of(request)))


async def cancel_batch(request: web.Request) -> web.Response:
    batches = batches_of(request)
    record = batches.folder.get(request.match_info["id"], owner_of(request))
    return web.json_response(batches.cancel(record))
