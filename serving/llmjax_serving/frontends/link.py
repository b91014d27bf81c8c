"""What a frontend and the engine's process say to each other, over a socket that only they have.

A message is a msgpack array `(name, number, arguments)`. One with a number is answered under that
number: `(ANSWER, number, (value,))`, or `(FAILED, number, (error,))`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import msgpack

from llmjax.errors import EngineDeadError

from .wire import error_in, error_out

logger = logging.getLogger(__name__)

ANSWER, FAILED, CANCEL = "answer", "failed", "cancel"
_TOLD = 0
"""The number of what is not answered."""

Handlers = Mapping[str, Callable[..., Any]]


class Link(asyncio.Protocol):
    """One end. Its handlers take a message's arguments; what one returns, or a coroutine of it
    does, is the answer.

    Args:
        on_lost: called once, when the other side has gone.
    """

    def __init__(self, handlers: Handlers, on_lost: Callable[[], None]):
        self._handlers, self._on_lost = handlers, on_lost
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._working: dict[int, asyncio.Task[Any]] = {}
        self._unpacker = msgpack.Unpacker(use_list=False, strict_map_key=False, max_buffer_size=0)
        self._packer = msgpack.Packer()
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self.is_lost = False

    @classmethod
    async def over(
        cls, sock: socket.socket, handlers: Handlers, on_lost: Callable[[], None]
    ) -> Link:
        """The end of a connected socket, which it owns."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(lambda: cls(handlers, on_lost), sock=sock)
        return link

    def tell(self, name: str, *arguments: Any) -> None:
        """Sends what is not answered; to nobody, where the other side has gone."""
        self._send(name, _TOLD, arguments)

    async def call(self, name: str, *arguments: Any) -> Any:
        """Sends, and waits for the answer; whoever is cancelled takes it back.

        Raises:
            EngineDeadError: the other side has gone.
            LlmjaxError, ApiError: what went wrong there.
        """
        if self.is_lost:
            raise _gone()
        number = next(self._numbers)
        future = self._waiting[number] = self._loop.create_future()
        self._send(name, number, arguments)
        try:
            return await future
        except asyncio.CancelledError:
            self.tell(CANCEL, number)
            raise
        finally:
            self._waiting.pop(number, None)

    @property
    def backlog(self) -> int:
        """Bytes that the other side has not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        self._flush()
        if self._transport is not None:
            self._transport.close()

    # Of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unpacker.feed(data)
        for name, number, arguments in self._unpacker:
            try:
                self._take(name, number, arguments)
            except Exception:
                logger.exception("a message of the kind %s could not be taken", name)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_gone())
        for task in self._working.values():
            task.cancel()
        self._on_lost()

    def _take(self, name: str, number: int, arguments: tuple[Any, ...]) -> None:
        if name in (ANSWER, FAILED):
            future = self._waiting.get(number)
            if future is not None and not future.done():
                if name == ANSWER:
                    future.set_result(arguments[0])
                else:
                    future.set_exception(error_in(arguments[0]))
        elif name == CANCEL:
            if (task := self._working.get(arguments[0])) is not None:
                task.cancel()
        elif number == _TOLD:
            self._handlers[name](*arguments)
        else:
            self._working[number] = self._loop.create_task(self._answer(name, number, arguments))

    async def _answer(self, name: str, number: int, arguments: tuple[Any, ...]) -> None:
        try:
            value = self._handlers[name](*arguments)
            if asyncio.iscoroutine(value):
                value = await value
            self._send(ANSWER, number, (value,))
        except Exception as error:
            self._send(FAILED, number, (error_out(error),))
        finally:
            del self._working[number]

    def _send(self, name: str, number: int, arguments: tuple[Any, ...]) -> None:
        if self.is_lost:
            return
        if not self._out:
            # One system call for all that this turn of the event loop has to say.
            self._loop.call_soon(self._flush)
        self._out.append(self._packer.pack((name, number, arguments)))

    def _flush(self) -> None:
        if self._out and self._transport is not None and not self.is_lost:
            self._transport.write(b"".join(self._out))
        self._out.clear()


def _gone() -> EngineDeadError:
    return EngineDeadError("the process that computes has ended")
