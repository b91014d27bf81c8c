"""The engine behind an event loop: one thread steps, coroutines submit and listen."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..config import EngineConfig
from ..errors import EngineDeadError, GroupError, LlmjaxError, RequestFailedError, ShutdownError
from ..metrics import Metrics
from ..output import RequestOutput
from ..parallel.group import Group
from ..request import Request, RequestOptions, SamplingParams, SequenceDelta
from ..tokenizer import Tokenizer
from .engine import Engine
from .outputs import OutputProcessor
from .replicas import make_engine
from .snapshot import take_snapshot
from .stats import EngineStats

log = logging.getLogger(__name__)

STALL_SECONDS = 300.0
"""Work that no step has come out of for so long counts as an engine that makes no progress."""


MOST_FAILURES = 3
"""Steps that fail in a row, after which there is no hope for the next one."""

SNAPSHOT_SECONDS = 10.0
"""What a snapshot may take, for most of which it waits for the end of a step."""


@dataclass(eq=False)
class _Stream:
    """One request's way back to its coroutine; `ready` is set when there is news.

    Attributes:
        name: what the caller calls the request. The engine knows it by an id of its own, which
            no other request has, not even one of that name that is on its way out.
    """

    name: str
    request: Request
    prompt: str | None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    error: LlmjaxError | None = None


@dataclass(eq=False)
class _Wanted:
    """A snapshot that somebody waits for."""

    engine: Engine
    answer: Future[dict[str, Any]] = field(default_factory=Future)


_Message = _Stream | str | _Wanted
"""To the engine's thread: a request, the id of one to end, or a snapshot to take."""


class AsyncEngine:
    """Serves the requests of one event loop.

    What a request has produced is merged until its coroutine takes it, so a slow client
    costs no more memory than its own text.

    Attributes:
        ended: set once it has stopped, or cannot go on.
    """

    def __init__(self, config: EngineConfig, group: Group | None = None):
        self.engine = make_engine(config, group)
        self._group = group
        self.ended = asyncio.Event()
        self.config = config
        self._processor = OutputProcessor(self.engine.model.tokenizer, self.engine.trace)
        self._processor_lock = threading.Lock()
        self._ids = map(str, itertools.count())
        self._streams: dict[str, _Stream] = {}
        self._inbox: deque[_Message] = deque()
        self._wake = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="llmjax-engine", daemon=True)
        self._stopping = False
        self._draining = False
        self._error: LlmjaxError | None = None
        self._progress = [time.monotonic()] * len(self.engine.replicas)
        self._failures = 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.model.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.engine.model.config.vocab_size

    @property
    def generation_defaults(self) -> Mapping[str, float]:
        """Sampling values that the model's authors chose."""
        return self.engine.model.generation_defaults

    @property
    def metrics(self) -> Metrics:
        """Of the first replica; `Metrics.of` has the others'."""
        return self.engine.metrics

    def start(self) -> None:
        """Starts stepping; call from the event loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        if self._group is not None:
            self._group.watch(self._on_lost)

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        options: RequestOptions | None = None,
        on_cut: Callable[[RequestOutput], None] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs a request; each output holds what is new since the one before.

        Closing the iteration early, or cancelling it, aborts the request.

        Args:
            request_id: the outputs carry it, and `abort` takes it.
            options: how it is treated beside others.
            on_cut: called with the news that nobody has taken, which may be none, where a request
                that has begun to run fails, or its iteration is closed early.

        Raises:
            InvalidRequestError, QueueFullError: before the first output.
            RequestTimeoutError, QueueTimeoutError: it was late to end, or to begin.
            RequestFailedError: the step failed that computed it.
            EngineDeadError: the engine has stopped.
            ShutdownError: it takes no new requests, or this one was cut off.
        """
        key, eos = next(self._ids), self.tokenizer.eos_token_ids
        request = Request(key, prompt_token_ids, params, eos, options or RequestOptions())
        if (rules := self.engine.grammars.compile(params)) is not None:
            request.rules = await asyncio.wrap_future(rules)
        if self._draining:
            raise ShutdownError("the engine is shutting down and takes no new requests")
        stream = _Stream(request_id, request, prompt)
        # Known before health is checked: a loop that dies in between fails it too.
        self._streams[key] = stream
        finished = True  # nothing to abort before it is sent
        try:
            self.check_health()
            self._send(stream)
            finished = False
            while not finished:
                await stream.ready.wait()
                stream.ready.clear()
                if stream.error is not None:
                    finished = True
                    raise stream.error
                with self._processor_lock:
                    output = self._processor.output(key, delta=True)
                output.request_id = request_id
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
                if on_cut is not None and request.began:
                    with self._processor_lock:
                        on_cut(self._processor.output(key, delta=True))
                self._send(key)

    def abort(self, request_id: str) -> None:
        """Ends a request: its iteration gets a last output with finish_reason "abort"."""
        for key, stream in self._streams.items():
            if stream.name == request_id:
                self._send(key)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    async def drain(self, timeout: float) -> int:
        """Refuses new requests, waits for the running ones, then stops.

        Returns:
            How many had not ended within `timeout` seconds and are cut off.
        """
        self._draining = True
        deadline = time.monotonic() + timeout
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        cut_off = len(self._streams)
        self.stop()
        return cut_off

    def stop(self) -> None:
        """Ends stepping after the step at hand, without waiting for it.

        Requests still running fail with ShutdownError.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self.engine.wake()
        # Whoever stops the engine may end the process next.
        self.engine.trace.flush()

    def close(self) -> None:
        """Stops the engine and waits until it has stopped, compilation too."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()
        self.engine.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._error is None

    def check_health(self) -> None:
        """Raises where no request would be served.

        Raises:
            EngineDeadError: the loop has died, or there is work and no step gets done.
            ShutdownError: the engine was stopped.
        """
        if self._error is not None:
            raise _again(self._error)
        if not self._thread.is_alive():
            raise EngineDeadError("the engine is not running")
        for engine, progress in zip(self.engine.replicas, self._progress, strict=True):
            stalled = time.monotonic() - progress
            if engine.has_work and stalled > STALL_SECONDS:
                raise EngineDeadError(f"the engine has made no progress for {stalled:.0f} s")

    def describe(self) -> str:
        """What was loaded, for people."""
        return self.engine.describe()

    def stats(self) -> EngineStats:
        """Of all replicas together."""
        return self.engine.stats()

    def stats_of_each(self) -> list[EngineStats]:
        """Of each replica."""
        return [engine.stats() for engine in self.engine.replicas]

    async def snapshot(self, number: int = 0) -> dict[str, Any]:
        """What an engine holds and runs between two steps (`snapshot.take_snapshot`).

        Args:
            number: of the replica.

        Raises:
            EngineDeadError: the engine has stopped, or is busy with one step for too long.
        """
        self.check_health()
        wanted = _Wanted(self.engine.replicas[number])
        self._send(wanted)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(wanted.answer), SNAPSHOT_SECONDS)
        except TimeoutError as error:
            raise EngineDeadError(
                f"the engine has not come to the end of a step for {SNAPSHOT_SECONDS:g} s"
            ) from error

    def _send(self, message: _Message) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()
        self.engine.wake()

    def _run(self) -> None:
        group = self._group
        try:
            while True:
                with self._wake:
                    while not (self._inbox or self.engine.has_work or self._stopping):
                        self._wake.wait()
                    if self._stopping:
                        break
                    inbox, self._inbox = self._inbox, deque()
                self._note_progress(())
                for message in inbox:
                    self._handle(message)
                if self.engine.has_work:
                    self._step()
            self._fail_all(ShutdownError("the engine was shut down before the request had ended"))
            self.engine.replicas[0].runner.stop()
        except Exception as error:
            log.exception("the engine loop failed")
            others = f" ({group.size} processes; each logs what it knows)" if group else ""
            failed = EngineDeadError(f"the engine has stopped: {error}{others}")
            failed.__cause__ = error
            self._fail_all(failed)
            with suppress(GroupError):
                self.engine.replicas[0].runner.stop(str(failed))
        finally:
            self._call_soon(self.ended.set)

    def _on_lost(self, reason: str) -> None:
        """Another process is lost, for which a step may now wait for ever."""
        if self._error is None:
            log.error("%s", reason)
            self._fail_all(EngineDeadError(f"the engine has stopped: {reason}"))
        self._call_soon(self.ended.set)

    def _step(self) -> None:
        before = [engine.num_steps for engine in self.engine.replicas]
        try:
            news = self.engine.step()
        except Exception as error:
            self._failures += 1
            # What other processes hold cannot be made anew from here.
            if self._failures == MOST_FAILURES or self._group is not None:
                raise
            log.exception("a step failed, and its requests with it; the engine goes on")
            news = self.engine.recover(error)
        self._publish(news)
        if before != [engine.num_steps for engine in self.engine.replicas]:
            self._failures = 0
        self._note_progress(before)

    def _note_progress(self, before: Sequence[int]) -> None:
        """Notes who goes on, or has nothing to do.

        Args:
            before: steps that were committed when it was noted last.
        """
        now = time.monotonic()
        for number, engine in enumerate(self.engine.replicas):
            # While all wait for prefill workers there is an end to it, by `prefill_timeout`.
            idle = not engine.has_work or engine.awaits_pages
            if idle or (before and engine.num_steps != before[number]):
                self._progress[number] = now

    def _handle(self, message: _Message) -> None:
        if isinstance(message, _Wanted):
            if message.answer.set_running_or_notify_cancel():
                try:
                    message.answer.set_result(take_snapshot(message.engine))
                except Exception as error:
                    message.answer.set_exception(error)
            return
        if isinstance(message, str):
            deltas = self.engine.abort(message)
            if message not in self._streams:
                with self._processor_lock:
                    self._processor.remove(message)
            self._publish(deltas)
            return
        try:
            self.engine.add(message.request)
        except Exception as error:
            if not isinstance(error, LlmjaxError):
                log.exception("a request could not be queued")
                self.engine.abort(message.request.id)
                error = RequestFailedError(f"the request could not be queued: {error}")
            message.error = error
            self._notify([message.request.id])
            return
        with self._processor_lock:
            self._processor.add(message.request, message.prompt)

    def _publish(self, deltas: Iterable[SequenceDelta]) -> None:
        with self._processor_lock:
            touched, stopped = self._processor.process(deltas)
        for request_id, index in stopped:
            self.engine.abort(request_id, index)
        if touched:
            self._notify(touched)

    def _notify(self, request_ids: Iterable[str]) -> None:
        def wake() -> None:
            for request_id in request_ids:
                stream = self._streams.get(request_id)
                if stream is not None:
                    stream.ready.set()

        self._call_soon(wake)

    def _call_soon(self, function: Callable[[], None]) -> None:
        """In the event loop."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            log.debug("the event loop is closed; nobody listens any more")

    def _fail_all(self, error: LlmjaxError) -> None:
        self._error = self._error or error
        streams = list(self._streams.values())
        for stream in streams:
            stream.error = _again(error)
        self._notify([stream.request.id for stream in streams])


def _again(error: LlmjaxError) -> LlmjaxError:
    """An error of its own for each who meets it: raising one adds to its traceback."""
    copy = type(error)(str(error))
    copy.__cause__ = error.__cause__
    return copy
