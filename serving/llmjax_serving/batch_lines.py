"""Lines of OpenAI's batch files: requests in, answers out."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import aiohttp

from llmjax.checks import cut
from llmjax.errors import InvalidRequestError

ENDPOINTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/v1/score", "/v1/rerank"),
)
MAX_LINES = 50_000
"""As OpenAI's."""
_RETRIES = 1000
"""Of a request that the server is too busy for; each waits for as long as the server says."""
_LONGEST_WAIT = 30.0

JsonObject = dict[str, Any]


class Line(NamedTuple):
    """A request of a batch."""

    custom_id: str
    url: str
    body: JsonObject


class Answered(NamedTuple):
    """A line and what came of it; a status of 0 is no answer at all."""

    line: Line
    status: int
    body: JsonObject

    @property
    def failed(self) -> bool:
        return self.status != 200

    def as_dict(self) -> JsonObject:
        """As a line of an output file."""
        told: JsonObject = {"id": self._id("batch_req"), "custom_id": self.line.custom_id}
        if self.status == 0:
            error = {"code": "not_answered", "message": self.body["message"]}
            return told | {"response": None, "error": error}
        answer = {"status_code": self.status, "request_id": self._id("req"), "body": self.body}
        return told | {"response": answer, "error": None}

    @staticmethod
    def _id(prefix: str) -> str:
        return f"{prefix}_{uuid.uuid4().hex}"


def read_lines(text: str, endpoint: str | None = None) -> list[Line]:
    """The requests of a file.

    Args:
        endpoint: the only one that may be asked.

    Raises:
        InvalidRequestError: says which line is wrong, and what is allowed.
    """
    lines: list[Line] = []
    seen: set[str] = set()
    for number, raw in enumerate(text.split("\n"), 1):
        if not raw.strip():
            continue
        line = _read_line(raw, number, (endpoint,) if endpoint is not None else ENDPOINTS)
        if line.custom_id in seen:
            raise _wrong(number, f"the custom_id {cut(line.custom_id)!r} is there twice")
        seen.add(line.custom_id)
        lines.append(line)
        if len(lines) > MAX_LINES:
            raise _wrong(number, f"more requests than {MAX_LINES}")
    if not lines:
        raise InvalidRequestError("the file has no requests", code="empty_file")
    return lines


def _read_line(raw: str, number: int, allowed: Sequence[str]) -> Line:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _wrong(number, f"it is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise _wrong(number, "it is no object")
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise _wrong(number, "custom_id is no text")
    if value.get("method", "POST") != "POST":
        raise _wrong(number, "method is something else than POST")
    if not isinstance(url, str) or url not in allowed:
        raise _wrong(number, f"url is {cut(repr(url))}, allowed: {', '.join(allowed)}")
    if not isinstance(body, dict):
        raise _wrong(number, "body is no object")
    if body.get("stream"):
        raise _wrong(number, "stream is not allowed in a batch")
    return Line(custom_id, url, body)


def _wrong(number: int, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"line {number}: {what}", code="invalid_json_line")


async def ask(
    session: aiohttp.ClientSession, base: str, line: Line, headers: dict[str, str]
) -> Answered:
    """One line's answer; where the server is too busy it is asked again."""
    try:
        for _ in range(_RETRIES):
            async with session.post(base + line.url, json=line.body, headers=headers) as response:
                if response.status in (429, 503) and "Retry-After" in response.headers:
                    wait = min(float(response.headers["Retry-After"]), _LONGEST_WAIT)
                    await asyncio.sleep(wait)
                    continue
                return Answered(line, response.status, await response.json())
        return Answered(line, 0, {"message": "the server was too busy all the time"})
    except (aiohttp.ClientError, ValueError) as error:
        return Answered(line, 0, {"message": f"no answer came: {error}"})


async def ask_all(
    session: aiohttp.ClientSession,
    base: str,
    lines: list[Line],
    *,
    at_once: int,
    headers: dict[str, str] | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> AsyncIterator[Answered]:
    """Every line's answer, as they come.

    Args:
        at_once: requests under way at a time.
        is_cancelled: asked before each request; true leaves the rest.
    """
    rest = iter(lines)
    running: set[asyncio.Task[Answered]] = set()
    try:
        while True:
            while len(running) < at_once and not is_cancelled():
                line = next(rest, None)
                if line is None:
                    break
                running.add(asyncio.ensure_future(ask(session, base, line, headers or {})))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
