"""What each request is called, in its answer and in the log."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from aiohttp import web

HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("request_id", str)

current: ContextVar[str] = ContextVar("request_id", default="-")
"""Of the request that is being handled."""

_SANE = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)


def name_of(request: web.Request) -> str:
    """What the client calls a request, if that does no harm in headers and logs, or a new name."""
    given = request.headers.get(HEADER, "")
    return given if _SANE.fullmatch(given) else uuid.uuid4().hex


@web.middleware
async def request_id_middleware(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    request[REQUEST_ID] = name_of(request)
    current.set(request[REQUEST_ID])
    return await handler(request)


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """A signal for `on_response_prepare`."""
    # aiohttp itself refuses some before they come to any middleware.
    response.headers[HEADER] = request.get(REQUEST_ID) or name_of(request)
