"""The thread that steps an engine: guests send it requests, and get what comes of them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from ..config import EngineConfig
from ..errors import EngineDeadError, GroupError, LlmjaxError, RequestFailedError, ShutdownError
from ..parallel.group import Group
from ..request import FinishReason, Request, Rules, SequenceDelta
from .draining import wait_and_stop
from .engine import Engine
from .replicas import make_engine
from .snapshot import take_snapshot
from .streams import again

log = logging.getLogger(__name__)

STALL_SECONDS = 300.0
"""Work that no step has come out of for so long counts as an engine that makes no progress."""


MOST_FAILURES = 3
"""Steps that fail in a row, after which there is no hope for the next one."""

SNAPSHOT_SECONDS = 10.0
"""What a snapshot may take, for most of which it waits for the end of a step."""


class Guest(Protocol):
    """Who sends requests. What comes of them is told by the engine's thread, refusals by any."""

    @property
    def num_requests(self) -> int:
        """Those that have not ended."""

    def publish(self, deltas: list[SequenceDelta]) -> list[tuple[str, int]]:
        """Takes a step's deltas; gives back (request id, choice) of what is to be stopped."""

    def refuse(self, request_id: str, error: LlmjaxError) -> None:
        """A request will not run."""

    def fail(self, error: LlmjaxError) -> None:
        """None of the requests goes on, and no other will run."""


class _End(NamedTuple):
    """The end of a request, or of one of its choices."""

    request_id: str
    choice: int | None


@dataclass(eq=False)
class _Wanted:
    """A snapshot that somebody waits for."""

    engine: Engine
    answer: Future[dict[str, Any]] = field(default_factory=Future)


_Message = Request | _End | _Wanted
"""To the engine's thread."""


class EngineThread:
    """Steps an engine while there is work. Any thread may use it.

    Attributes:
        ended: set, in the event loop that started it, once it has stopped, or cannot go on.
    """

    def __init__(self, config: EngineConfig, group: Group | None = None):
        self.engine = make_engine(config, group)
        self._group = group
        self.ended = asyncio.Event()
        self._guests: dict[str, Guest] = {}
        self._num_guests = 0
        self._compiling: dict[str, Request] = {}
        self.inbox: deque[_Message] = deque()
        self._wake = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="llmjax-engine", daemon=True)
        self._stopping = self._draining = False
        self._error: LlmjaxError | None = None
        self._progress = [time.monotonic()] * len(self.engine.replicas)
        self._failures = 0

    def start(self) -> None:
        """Starts stepping; call from the event loop that is told of the end."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        if self._group is not None:
            self._group.watch(self._on_lost)

    def join(self, guest: Guest) -> str:
        """From now on requests whose ids begin with what this returns are the guest's."""
        number = str(self._num_guests)
        self._num_guests += 1
        # A new one each time: the engine's thread goes through it.
        self._guests = {**self._guests, number: guest}
        return f"{number}-"

    def leave(self, prefix: str) -> None:
        """Forgets a guest, who has ended its requests."""
        self._guests = {n: g for n, g in self._guests.items() if f"{n}-" != prefix}

    def submit(self, request: Request) -> None:
        """Queues a request once what it is bound to is compiled; its guest is told a refusal."""
        if self._draining:
            self._refuse(
                request.id, ShutdownError("the engine is shutting down and takes no new requests")
            )
            return
        rules = self.engine.grammars.compile(request.params, is_bounded=True)
        if rules is None:
            self._send(request)
            return
        with self._wake:
            self._compiling[request.id] = request
        rules.add_done_callback(partial(self._on_rules, request))

    def end(self, request_id: str, index: int | None = None) -> None:
        """Ends a request or one of its choices, with finish_reason "abort"."""
        with self._wake:
            compiling = self._compiling.pop(request_id, None)
        if compiling is None:
            self._send(_End(request_id, index))
            return
        choices, ended = range(compiling.params.n), FinishReason.ABORT
        self._publish(SequenceDelta(request_id, i, [], [], finish_reason=ended) for i in choices)

    @property
    def num_requests(self) -> int:
        """Requests of all guests that have not ended."""
        return sum(guest.num_requests for guest in self._guests.values())

    async def drain(self, timeout: float) -> int:
        """Refuses new requests, waits for the running ones, then stops.

        Returns:
            How many had not ended within `timeout` seconds and are cut off.
        """
        self._draining = True
        return await wait_and_stop(self, timeout)

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
            raise again(self._error)
        if not self._thread.is_alive():
            raise EngineDeadError("the engine is not running")
        for engine, progress in zip(self.engine.replicas, self._progress, strict=True):
            stalled = time.monotonic() - progress
            if engine.has_work and stalled > STALL_SECONDS:
                raise EngineDeadError(f"the engine has made no progress for {stalled:.0f} s")

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
            self.inbox.append(message)
            self._wake.notify()
        self.engine.wake()

    def _on_rules(self, request: Request, rules: Future[Rules]) -> None:
        with self._wake:
            if self._compiling.pop(request.id, None) is None:
                return  # ended meanwhile
        try:
            request.rules = rules.result()
        except LlmjaxError as error:
            self._refuse(request.id, error)
        except Exception as error:
            log.exception("what a request is bound to could not be compiled")
            self._refuse(request.id, RequestFailedError(f"it could not be compiled: {error}"))
        else:
            self._send(request)

    def _run(self) -> None:
        group = self._group
        try:
            while True:
                with self._wake:
                    while not (self.inbox or self.engine.has_work or self._stopping):
                        self._wake.wait()
                    if self._stopping:
                        break
                    inbox, self.inbox = self.inbox, deque()
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
            self.call_soon(self.ended.set)

    def _on_lost(self, reason: str) -> None:
        """Another process is lost, for which a step may now wait for ever."""
        if self._error is None:
            log.error("%s", reason)
            self._fail_all(EngineDeadError(f"the engine has stopped: {reason}"))
        self.call_soon(self.ended.set)

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
        match message:
            case _Wanted():
                self._take_snapshot(message)
            case _End(request_id, choice):
                self._publish(self.engine.abort(request_id, choice))
            case Request():
                self._add(message)

    def _take_snapshot(self, wanted: _Wanted) -> None:
        if wanted.answer.set_running_or_notify_cancel():
            try:
                wanted.answer.set_result(take_snapshot(wanted.engine))
            except Exception as error:
                wanted.answer.set_exception(error)

    def _add(self, request: Request) -> None:
        try:
            self.engine.add(request)
        except Exception as error:
            if not isinstance(error, LlmjaxError):
                log.exception("a request could not be queued")
                self.engine.abort(request.id)
                error = RequestFailedError(f"the request could not be queued: {error}")
            self._refuse(request.id, error)

    def _publish(self, deltas: Iterable[SequenceDelta]) -> None:
        by_guest: dict[str, list[SequenceDelta]] = {}
        for delta in deltas:
            by_guest.setdefault(delta.request_id.partition("-")[0], []).append(delta)
        for number, news in by_guest.items():
            if (guest := self._guests.get(number)) is not None:
                for request_id, index in guest.publish(news):
                    self.engine.abort(request_id, index)

    def _refuse(self, request_id: str, error: LlmjaxError) -> None:
        guest = self._guests.get(request_id.partition("-")[0])
        if guest is not None:
            guest.refuse(request_id, error)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Has it called in the event loop."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            log.debug("the event loop is closed; nobody listens any more")

    def _fail_all(self, error: LlmjaxError) -> None:
        self._error = self._error or error
        for guest in self._guests.values():
            guest.fail(error)
