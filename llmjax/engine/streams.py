"""Requests on their way, and the coroutines that wait for what comes of them. No jax.

It is the same whether the engine is a thread of this process or another process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import LlmjaxError
from ..output import RequestOutput
from ..request import Request, SequenceDelta
from ..tokenizer import Tokenizer
from .outputs import OutputProcessor
from .trace import NoTrace

OnCut = Callable[[RequestOutput], None]
"""Called with the news that nobody has taken, which may be none."""


class Source(Protocol):
    """What computes the requests of `Streams`."""

    def check_health(self) -> None:
        """Raises where no request would be served."""

    def submit(self, request: Request) -> None:
        """Takes a request; a refusal comes by `Streams.refuse`."""

    def end(self, request_id: str) -> None:
        """Ends a request, all of its choices; of one that is unknown, nothing."""

    def cut(self, request: Request, on_begun: Callable[[], None]) -> None:
        """As `end`; calls `on_begun`, now or later, where the request has begun to run."""


@dataclass(eq=False)
class _Stream:
    """One request's way back to its coroutine; `ready` is set when there is news.

    Attributes:
        name: what the caller calls the request. The engine knows it by an id of its own, which
            no other request has, not even one of that name that is on its way out.
    """

    name: str
    request: Request
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    error: LlmjaxError | None = None


class Streams:
    """Merges what a request has produced until its coroutine takes it, so that a slow client
    costs no more memory than its own text.

    Any thread may call `publish`, `refuse` and `fail`; the rest is the event loop's.

    Args:
        trace: told what detokenising takes.
    """

    def __init__(self, tokenizer: Tokenizer, trace: NoTrace | None = None):
        self.processor = OutputProcessor(tokenizer, trace)
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._call_soon: Callable[[Callable[[], None]], object] = _now

    def call_by(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Says how a function is called in the event loop; by default that is where one is."""
        self._call_soon = call_soon

    @property
    def num_requests(self) -> int:
        """Those that have not ended, or whose last news nobody has taken."""
        return len(self._streams)

    def ids_of(self, name: str) -> list[str]:
        """The engine's ids of requests that their caller calls so."""
        return [key for key, stream in self._streams.items() if stream.name == name]

    def request(self, request_id: str) -> Request | None:
        """That of an id, where it has not ended."""
        stream = self._streams.get(request_id)
        return None if stream is None else stream.request

    async def follow(
        self,
        name: str,
        request: Request,
        prompt: str | None,
        source: Source,
        on_cut: OnCut | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs a request; each output holds what is new since the one before.

        Closing the iteration early, or cancelling it, ends the request.

        Raises:
            LlmjaxError: why it was refused or has failed.
        """
        stream, key = _Stream(name, request), request.id
        self.processor.add(request, prompt)
        # Known before health is checked: an engine that dies in between fails it too.
        self._streams[key] = stream
        finished = True  # nothing to end before it is sent
        try:
            source.check_health()
            source.submit(request)
            finished = False
            while not finished:
                await stream.ready.wait()
                stream.ready.clear()
                if stream.error is not None:
                    finished = True
                    raise stream.error
                output = self._news(stream)
                finished = output.finished
                if output.error is not None:
                    if on_cut is not None and request.began:
                        on_cut(output)
                    raise output.error
                if output.outputs:
                    yield output
        finally:
            del self._streams[key]
            if not finished:
                self._cut(stream, source, on_cut)
            self.processor.remove(key)

    def publish(self, deltas: Iterable[SequenceDelta]) -> list[tuple[str, int]]:
        """Takes in a step's deltas.

        Returns:
            (request id, choice) of those that a stop string ended, and that the engine must stop.
        """
        with self._lock:
            touched, stopped = self.processor.process(deltas)
        if touched:
            self._notify(touched)
        return stopped

    def refuse(self, request_id: str, error: LlmjaxError) -> None:
        """The request will not run, or not go on."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.error = error
            self._notify([request_id])

    def fail(self, error: LlmjaxError) -> None:
        """None of them goes on."""
        streams = list(self._streams.values())
        for stream in streams:
            stream.error = again(error)
        self._notify([stream.request.id for stream in streams])

    def _news(self, stream: _Stream) -> RequestOutput:
        with self._lock:
            output = self.processor.output(stream.request.id, delta=True)
        output.request_id = stream.name
        return output

    def _cut(self, stream: _Stream, source: Source, on_cut: OnCut | None) -> None:
        if on_cut is None:
            source.end(stream.request.id)
            return
        untold = self._news(stream)
        source.cut(stream.request, lambda: on_cut(untold))

    def _notify(self, request_ids: Iterable[str]) -> None:
        def wake() -> None:
            for request_id in request_ids:
                stream = self._streams.get(request_id)
                if stream is not None:
                    stream.ready.set()

        self._call_soon(wake)


def again(error: LlmjaxError) -> LlmjaxError:
    """An error of its own for each who meets it: raising one adds to its traceback."""
    copy = type(error)(str(error))
    copy.__cause__ = error.__cause__
    return copy


def _now(function: Callable[[], None]) -> None:
    function()
