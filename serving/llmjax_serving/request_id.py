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


@web.middleware
async def request_id_middleware(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Takes over what the client calls the request, if that does no harm in headers and logs."""
    given = request.headers.get(HEADER, "")
    request[REQUEST_ID] = given if _SANE.fullmatch(given) else uuid.uuid4().hex
    current.set(request[REQUEST_ID])
    return await handler(request)


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """A signal for `on_response_prepare`."""
    response.headers[HEADER] = request[REQUEST_ID]
