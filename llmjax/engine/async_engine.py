"""The engine behind an event loop: one thread steps, coroutines submit and listen."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from ..config import EngineConfig
from ..metrics import Metrics
from ..output import RequestOutput
from ..parallel.group import Group
from ..request import Request, RequestOptions, SamplingParams
from ..tokenizer import Tokenizer
from .engine import Engine
from .engine_thread import EngineThread
from .replicas import Replicas
from .stats import EngineStats
from .streams import OnCut, Streams


class AsyncEngine:
    """Serves the requests of one event loop, and of others who `thread.join`."""

    def __init__(self, config: EngineConfig, group: Group | None = None):
        self.thread = EngineThread(config, group)
        self.config = config
        self.streams = Streams(self.tokenizer, self.engine.trace)
        prefix = self.thread.join(self.streams)
        self._ids = (f"{prefix}{number}" for number in itertools.count())

    @property
    def engine(self) -> Engine | Replicas:
        return self.thread.engine

    @property
    def ended(self) -> Any:
        """An `asyncio.Event`, set once it has stopped, or cannot go on."""
        return self.thread.ended

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
        self.streams.call_by(self.thread.call_soon)
        self.thread.start()

    def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        options: RequestOptions | None = None,
        on_cut: OnCut | None = None,
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
        return self.streams.follow(request_id, request, prompt, self, on_cut)

    def abort(self, request_id: str) -> None:
        """Ends a request: its iteration gets a last output with finish_reason "abort"."""
        for key in self.streams.ids_of(request_id):
            self.thread.end(key)

    # What `Streams` asks of it

    def submit(self, request: Request) -> None:
        self.thread.submit(request)

    def end(self, request_id: str) -> None:
        self.thread.end(request_id)

    def cut(self, request: Request, on_begun: Callable[[], None]) -> None:
        if request.began:
            on_begun()
        self.thread.end(request.id)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, those of others too."""
        return self.thread.num_requests

    async def drain(self, timeout: float) -> int:
        """See `EngineThread.drain`."""
        return await self.thread.drain(timeout)

    def stop(self) -> None:
        """See `EngineThread.stop`."""
        self.thread.stop()

    def close(self) -> None:
        """Stops the engine and waits until it has stopped, compilation too."""
        self.thread.close()

    @property
    def is_alive(self) -> bool:
        return self.thread.is_alive

    def check_health(self) -> None:
        """See `EngineThread.check_health`."""
        self.thread.check_health()

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
        """See `EngineThread.snapshot`."""
        return await self.thread.snapshot(number)
