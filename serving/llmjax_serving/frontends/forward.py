"""What one process keeps for all: requests about it go on to that process, as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from llmjax.errors import EngineDeadError

from ..private_site import BASE
from ..request_id import HEADER, REQUEST_ID

_OF_A_CONNECTION = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "expect"}
)
_OF_HERE = frozenset({"date", "server", "vary", HEADER.lower()})
"""Headers of answers that this process writes itself."""
_CORS = "access-control-"


class Forwarder:
    """Hands requests on over the Unix socket at `path`."""

    def __init__(self, path: str):
        self._path = path
        self._session: aiohttp.ClientSession | None = None

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """For `cleanup_ctx`."""
        connector = aiohttp.UnixConnector(self._path, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as session:
            self._session = session
            yield

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """The answer of the other process, piece by piece as it comes.

        Raises:
            EngineDeadError: that process gives none.
        """
        assert self._session is not None
        headers = _without(request.headers, _OF_A_CONNECTION | {"origin"})
        headers[HEADER] = request[REQUEST_ID]
        body = request.content if request.can_read_body else None
        try:
            async with self._session.request(
                request.method, BASE + request.path_qs, headers=headers, data=body
            ) as answer:
                response = web.StreamResponse(
                    status=answer.status,
                    reason=answer.reason,
                    headers=_without(answer.headers, _OF_A_CONNECTION | _OF_HERE),
                )
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
        except aiohttp.ClientError as error:
            raise EngineDeadError(f"the process that computes does not answer: {error}") from error
        await response.write_eof()
        return response


def _without(headers: Any, left_out: frozenset[str]) -> CIMultiDict[str]:
    kept = (
        (name, value)
        for name, value in headers.items()
        if name.lower() not in left_out and not name.lower().startswith(_CORS)
    )
    return CIMultiDict(kept)


def forwarding_middleware(forwarder: Forwarder, kept: frozenset[str]) -> Any:
    """Sends what is asked of the routes `kept`, by their canonical paths, to where it is known."""

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is not None and resource.canonical in kept:
            return await forwarder.answer(request)
        return await handler(request)

    return middleware
