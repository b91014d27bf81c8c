"""The engine behind an event loop: one thread steps, coroutines submit and listen."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, field

from ..config import EngineConfig
from ..errors import EngineDeadError, LlmjaxError
from ..metrics import Metrics
from ..request import Request, RequestOutput, SamplingParams, SequenceDelta
from ..tokenizer import Tokenizer
from .engine import Engine, EngineStats
from .outputs import OutputProcessor

log = logging.getLogger(__name__)

STALL_SECONDS = 300.0
"""A step that takes longer than this counts as a loop that makes no progress."""


@dataclass(eq=False)
class _Stream:
    """One request's way back to its coroutine; `ready` is set when there is news."""

    request: Request
    prompt: str | None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    error: LlmjaxError | None = None


class AsyncEngine:
    """Serves the requests of one event loop.

    What a request has produced is merged until its coroutine takes it, so a slow client
    costs no more memory than its own text.
    """

    def __init__(self, config: EngineConfig):
        self.engine = Engine(config)
        self.config = config
        self._processor = OutputProcessor(self.engine.model.tokenizer)
        self._processor_lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._inbox: deque[_Stream | str] = deque()
        self._wake = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="llmjax-engine", daemon=True)
        self._stopping = False
        self._draining = False
        self._error: Exception | None = None
        self._progress = time.monotonic()

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
        return self.engine.metrics

    def start(self) -> None:
        """Starts stepping; call from the event loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs a request; each output holds what is new since the one before.

        Closing the iteration early, or cancelling it, aborts the request.

        Args:
            request_id: one that no other request has had.

        Raises:
            InvalidRequestError, QueueFullError: before the first output.
            EngineDeadError: the engine has stopped, or is shutting down.
        """
        if self._draining:
            raise EngineDeadError("the server is shutting down")
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is in use")
        eos = self.tokenizer.eos_token_ids
        stream = _Stream(Request(request_id, prompt_token_ids, params, eos), prompt)
        # Known before health is checked: a loop that dies in between fails it too.
        self._streams[request_id] = stream
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
                    output = self._processor.output(request_id, delta=True)
                finished = output.finished
                if output.outputs:
                    yield output
        finally:
            del self._streams[request_id]
            if not finished:
                self._send(request_id)

    def abort(self, request_id: str) -> None:
        """Ends a request: its iteration gets a last output with finish_reason "abort"."""
        self._send(request_id)

    async def drain(self, timeout: float) -> bool:
        """Refuses new requests, waits for the running ones, then stops.

        Returns:
            Whether all had ended within `timeout` seconds; the others are aborted.
        """
        self._draining = True
        deadline = time.monotonic() + timeout
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        done = not self._streams
        self.stop()
        return done

    def stop(self) -> None:
        """Ends stepping after the step at hand, without waiting for it.

        Requests still running fail with EngineDeadError.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()

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
        """Raises EngineDeadError when the loop has died or makes no progress."""
        if self._error is not None:
            raise EngineDeadError(f"the engine stopped: {self._error}") from self._error
        if not self._thread.is_alive():
            raise EngineDeadError("the engine is not running")
        stalled = time.monotonic() - self._progress
        if self.engine.has_work and stalled > STALL_SECONDS:
            raise EngineDeadError(f"the engine has made no progress for {stalled:.0f} s")

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def _send(self, message: _Stream | str) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._inbox or self.engine.has_work or self._stopping):
                        self._wake.wait()
                    if self._stopping:
                        break
                    inbox, self._inbox = self._inbox, deque()
                self._progress = time.monotonic()
                for message in inbox:
                    self._handle(message)
                if self.engine.has_work:
                    self._publish(self.engine.step())
            self._fail_all(EngineDeadError("it was shut down"))
        except Exception as error:
            log.exception("the engine loop failed")
            self._fail_all(error)

    def _handle(self, message: _Stream | str) -> None:
        if isinstance(message, str):
            deltas = self.engine.abort(message)
            if message not in self._streams:
                with self._processor_lock:
                    self._processor.remove(message)
            self._publish(deltas)
            return
        try:
            self.engine.add(message.request)
        except LlmjaxError as error:
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

        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(wake)
        except RuntimeError:
            log.debug("the event loop is closed; nobody listens any more")

    def _fail_all(self, cause: Exception) -> None:
        self._error = cause
        streams = list(self._streams.values())
        for stream in streams:
            stream.error = EngineDeadError(f"the engine stopped: {cause}")
            stream.error.__cause__ = cause
        self._notify([stream.request.id for stream in streams])
