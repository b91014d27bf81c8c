"""What clients send and read must move: those that stand still are cut off."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web

from .body_budget import BODY, CLAIM, BodyBudget, Claim, read_body
from .errors import ApiError, Handler

logger = logging.getLogger(__name__)

LEAST_BYTES = 1024
"""A client that has read less than that within its time, of what was there, reads nothing."""
CHECKS = 4
"""Within a client's time."""


class ReaderWatch:
    """Cuts a connection off whose client stops reading an answer.

    That holds for as long as anything of it is still there to be read, also when the handler
    has ended: the operating system would wait for ever. The next request of the connection
    brings a watch of its own, which takes over.

    Args:
        watches: of all connections; it is among them for as long as it watches.
    """

    def __init__(
        self,
        request: web.Request,
        transport: asyncio.Transport,
        timeout: float,
        watches: dict[asyncio.Transport, ReaderWatch],
    ):
        self._loop = asyncio.get_running_loop()
        self._writer, self._transport = request.writer, transport
        self._remote, self._timeout = request.remote, timeout
        self._sent = 0
        self._moved = self._loop.time()
        self._has_ended = False
        self._watches = watches
        if (before := watches.get(transport)) is not None:
            before._handle.cancel()
        watches[transport] = self
        self._schedule()

    def end(self) -> None:
        """All of the answer has been written."""
        self._has_ended = True
        if not self._transport.get_write_buffer_size():
            self._stop()

    def _stop(self) -> None:
        self._handle.cancel()
        if self._watches.get(self._transport) is self:
            del self._watches[self._transport]

    def _schedule(self) -> None:
        self._handle = self._loop.call_later(self._timeout / CHECKS, self._check)

    def _check(self) -> None:
        waiting, now = self._transport.get_write_buffer_size(), self._loop.time()
        sent = self._writer.output_size - waiting
        if not waiting or sent - self._sent >= LEAST_BYTES:
            self._sent, self._moved = sent, now
        elif now - self._moved >= self._timeout:
            logger.info("%s reads nothing for %g s and is cut off", self._remote, self._timeout)
            self._transport.abort()
            self._stop()
            return
        if waiting or not self._has_ended:
            self._schedule()
        else:
            self._stop()


def delivery_middleware(timeout: float) -> Any:
    """Sends what handlers return, all of it, to clients that read it."""
    watches: dict[asyncio.Transport, ReaderWatch] = {}

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        if transport is None:  # it has left
            return await handler(request)
        watch = ReaderWatch(request, transport, timeout, watches)
        try:
            response = await handler(request)
            if isinstance(response, web.FileResponse):
                return response  # which is sent once only, and not from memory
            try:
                await response.prepare(request)
                await response.write_eof()
            except ConnectionError:
                logger.debug("a client left before its answer had been sent")
        finally:
            watch.end()
        return response

    return middleware


def body_middleware(timeout: float, budget: BodyBudget) -> Any:
    """Reads the body of a POST request, which must come within `timeout` seconds."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        with budget.claim() as claim:
            request[CLAIM] = claim
            # Uploads are taken apart as they come, by their handler.
            if request.content_type != "multipart/form-data":
                request[BODY] = await body_in_time(request, claim, timeout)
            return await handler(request)

    return middleware


async def body_in_time(request: web.Request, claim: Claim, timeout: float) -> bytes:
    """Raises ApiError where it does not come, and what `Claim.add` does."""
    try:
        async with asyncio.timeout(timeout):
            return await read_body(request, claim)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not come within {timeout:g} s",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body cannot be read: {error}") from error
