"""Server-sent events: what a streamed answer looks like on the wire."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from llmjax.request import RequestOutput

from .errors import api_error
from .formatter import Formatter
from .generation import collect

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"


def encode(events: Iterable[dict[str, Any]]) -> bytes:
    # ASCII escapes: some clients split lines at U+2028 and U+0085 as well.
    return b"".join(b"data: %b\n\n" % json.dumps(e, separators=(",", ":")).encode() for e in events)


async def respond(
    request: web.Request,
    outputs: AsyncIterator[tuple[int, RequestOutput]],
    formatter: Formatter,
    *,
    stream: bool,
    num_prompts: int,
) -> web.StreamResponse:
    """Answers with `outputs`, (prompt number, news) each, as events or as one body."""
    async with aclosing(outputs):  # type: ignore[type-var]
        if stream:
            return await respond_with_events(request, outputs, formatter)
        return web.json_response(formatter.response(await collect(outputs, num_prompts)))


async def respond_with_events(
    request: web.Request, outputs: AsyncIterator[tuple[int, RequestOutput]], formatter: Formatter
) -> web.StreamResponse:
    """Streams `outputs` to the client.

    Headers leave with the first output, so that what is refused before has its own HTTP
    status; a later error becomes an event. While the client does not read, `write` waits and
    nothing is pulled from `outputs`: the engine merges the news meanwhile.
    """
    first = await anext(outputs)
    response = web.StreamResponse(headers=HEADERS)
    await response.prepare(request)
    try:
        await response.write(encode([*formatter.begin(), *formatter.chunks(*first)]))
        async for prompt, output in outputs:
            events = formatter.chunks(prompt, output)
            if events:
                await response.write(encode(events))
        tail = encode(formatter.end()) + DONE
    except ConnectionError:
        raise
    except Exception as error:
        tail = encode([api_error(error).body()])
    await response.write_eof(tail)
    return response
