"""Server-sent events: what a streamed answer looks like on the wire."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from llmjax.output import RequestOutput

from .errors import api_error
from .formatter import Formatter
from .generation import Outputs, collect
from .state import STATE

logger = logging.getLogger(__name__)

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def encode(events: Iterable[dict[str, Any]], named: bool = False) -> bytes:
    """Events on the wire; `named`: by their own "type"."""
    # ASCII escapes: some clients split lines at U+2028 and U+0085 as well.
    return b"".join(
        (b"event: %b\n" % e["type"].encode() if named else b"")
        + b"data: %b\n\n" % json.dumps(e, separators=(",", ":")).encode()
        for e in events
    )


def size_of(output: RequestOutput) -> int:
    """What there is to write, about: tokens, those that are told with log-probabilities, and
    texts."""
    prompt = len(output.prompt or output.prompt_token_ids)
    rows = [output.prompt_logprobs or (), *(choice.logprobs or () for choice in output.outputs)]
    told = sum(len(row) for choice in rows for row in choice if row is not None)
    return prompt + 16 * told + sum(len(c.text) + len(c.token_ids) for c in output.outputs)


async def respond(
    request: web.Request, outputs: Outputs, formatter: Formatter, *, stream: bool, num_prompts: int
) -> web.StreamResponse:
    """Answers with `outputs`, as events or as one body."""
    async with aclosing(outputs):
        if stream:
            return await respond_with_events(request, outputs, formatter)
        whole = await collect(outputs, num_prompts)
        # Log-probabilities of a long prompt are megabytes of JSON.
        body = await request.app[STATE].computed(
            sum(map(size_of, whole)), lambda: json.dumps(formatter.response(whole))
        )
    return web.json_response(text=body)


async def respond_with_events(
    request: web.Request, outputs: Outputs, formatter: Formatter
) -> web.StreamResponse:
    """Streams `outputs` to the client.

    Headers leave with the first output, so that what is refused before has its own HTTP
    status; a later error becomes an event. While the client does not read, `write` waits and
    nothing is pulled from `outputs`: the engine merges the news meanwhile.
    """
    prompt, output = await anext(outputs)
    named = formatter.names_events
    response = web.StreamResponse(headers=HEADERS)
    try:
        await response.prepare(request)
        head = await request.app[STATE].computed(
            size_of(output),
            lambda: encode([*formatter.begin(), *formatter.chunks(prompt, output)], named),
        )
        await response.write(head)
        async for prompt, output in outputs:
            events = formatter.chunks(prompt, output)
            if events:
                await response.write(encode(events, named))
        await response.write(encode(formatter.end(), named) + formatter.ends_with)
    except ConnectionError:
        logger.debug("a client left in the middle of its stream")
    except Exception as error:
        await response.write(encode([formatter.error_event(api_error(error))], named))
    return response
