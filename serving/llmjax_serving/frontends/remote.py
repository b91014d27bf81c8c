"""An engine in another process, and what that process keeps, as a frontend sees them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from llmjax.config import EngineConfig
from llmjax.engine.streams import OnCut, Streams, again
from llmjax.errors import EngineDeadError, LlmjaxError
from llmjax.metrics import Metrics
from llmjax.output import RequestOutput
from llmjax.request import Request, RequestOptions, SamplingParams
from llmjax.tokenizer import Tokenizer

from ..keys import LIMITS, ApiKey
from ..limits import Account, Accounts
from .link import Handlers, Link
from .wire import delta_in, error_in, request_out

if TYPE_CHECKING:
    from llmjax.engine.async_engine import AsyncEngine
    from llmjax.engine.pooling import PoolingEngine
    from llmjax.engine.pooling_inputs import InputMaker, PoolingInput


@dataclass(frozen=True)
class Description:
    """What a frontend has of the engine itself; it travels pickled.

    Attributes:
        task, inputs: of a model that embeds or scores; None of one that generates.
    """

    config: EngineConfig
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    generation_defaults: Mapping[str, float]
    task: str | None = None
    inputs: InputMaker | None = None

    @classmethod
    def of(cls, engine: AsyncEngine) -> Description:
        return cls(**cls._common(engine), generation_defaults=dict(engine.generation_defaults))

    @classmethod
    def of_pooling(cls, engine: PoolingEngine) -> Description:
        own: dict[str, Any] = {"task": engine.task, "inputs": engine.inputs}
        return cls(**cls._common(engine), generation_defaults={}, **own)

    @staticmethod
    def _common(engine: AsyncEngine | PoolingEngine) -> dict[str, Any]:
        names = ("config", "tokenizer", "max_model_len", "vocab_size")
        return {name: getattr(engine, name) for name in names}


class _Remote:
    """Attributes:
    metrics: what is counted here.
    """

    def __init__(self, link: Link, about: Description):
        self._link, self._about = link, about
        self._error: LlmjaxError | None = None
        self.metrics = Metrics(about.config.model.name)
        for number in range(1, about.config.parallel.data_parallel_size):
            Metrics(about.config.model.name, number, beside=self.metrics)

    @property
    def config(self) -> EngineConfig:
        return self._about.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._about.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._about.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._about.vocab_size

    @property
    def generation_defaults(self) -> Mapping[str, float]:
        return self._about.generation_defaults

    def check_health(self) -> None:
        """Raises LlmjaxError: why nothing would be served."""
        if self._error is not None:
            raise again(self._error)
        if self._link.is_lost:
            raise EngineDeadError("the process that computes has ended")


class RemoteEngine(_Remote):
    """Generates as `AsyncEngine` does; detokenising and stop strings are this process's."""

    def __init__(self, link: Link, about: Description):
        super().__init__(link, about)
        self.streams = Streams(about.tokenizer)
        self._ids = map(str, itertools.count())
        self._asking: set[asyncio.Task[None]] = set()

    @property
    def handlers(self) -> Handlers:
        """For what the engine's process tells."""
        return {"news": self._take, "refused": self._refused, "failed_all": self._failed_all}

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
        """See `AsyncEngine.generate`."""
        request = Request(
            next(self._ids), prompt_token_ids, params, options=options or RequestOptions()
        )
        return self.streams.follow(request_id, request, prompt, self, on_cut)

    def fail(self, error: LlmjaxError) -> None:
        """No request goes on, and none is taken."""
        self._error = self._error or error
        self.streams.fail(error)

    # What `Streams` asks of it

    def submit(self, request: Request) -> None:
        self._link.tell("submit", *request_out(request))

    def end(self, request_id: str) -> None:
        self._link.tell("end", request_id)

    def cut(self, request: Request, on_begun: Callable[[], None]) -> None:
        if request.began:
            on_begun()
            self.end(request.id)
            return
        task = asyncio.ensure_future(self._cut(request.id, on_begun))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _cut(self, request_id: str, on_begun: Callable[[], None]) -> None:
        if not self._link.is_lost and await self._link.call("cut", request_id):
            on_begun()

    # What it is told

    def _take(self, told: Sequence[tuple[Any, ...]]) -> None:
        deltas = []
        for one in told:
            delta, engine, began = delta_in(one)
            if (request := self.streams.request(delta.request_id)) is not None:
                request.engine, request.began = engine, began
                deltas.append(delta)
        for request_id, index in self.streams.publish(deltas):
            self._link.tell("end", request_id, index)

    def _refused(self, request_id: str, error: tuple[Any, ...]) -> None:
        self.streams.refuse(request_id, error_in(error))

    def _failed_all(self, error: tuple[Any, ...]) -> None:
        self.fail(error_in(error))


class RemotePooling(_Remote):
    """Embeds or scores as `PoolingEngine` does; it may be asked by one event loop."""

    @property
    def handlers(self) -> Handlers:
        return {}

    @property
    def task(self) -> str:
        assert self._about.task is not None
        return self._about.task

    @property
    def inputs(self) -> InputMaker:
        assert self._about.inputs is not None
        return self._about.inputs

    async def run(self, inputs: Sequence[PoolingInput]) -> list[np.ndarray]:
        """See `PoolingEngine.run`."""
        self.check_health()
        told = await self._link.call("pool", list(map(tuple, inputs)))
        vectors = [np.frombuffer(one, np.float32) for one in told]
        return [
            vector.reshape(len(each.token_ids), -1) if each.of_tokens else vector
            for each, vector in zip(inputs, vectors, strict=True)
        ]

    def fail(self, error: LlmjaxError) -> None:
        """None is taken; what is asked fails with the link."""
        self._error = self._error or error


def remote(link: Link, about: Description) -> RemoteEngine | RemotePooling:
    return RemoteEngine(link, about) if about.task is None else RemotePooling(link, about)


class RemoteAccounts(Accounts):
    """Limits count for all frontends together; keys that have none need not ask."""

    def __init__(self, link: Link):
        self._link = link

    def account(self, key: ApiKey) -> Account:
        limits = {name: getattr(key, name) for name in LIMITS}
        return RemoteAccount(self._link, key.name, limits) if any(limits.values()) else Account()


class RemoteAccount(Account):
    """Where a key stands by the account in the engine's process."""

    def __init__(self, link: Link, name: str, limits: dict[str, int | None]):
        self._link, self._name, self._limits = link, name, limits
        self._is_known = False

    async def enter(self) -> None:
        self._is_known = True
        asking = asyncio.ensure_future(self._link.call("enter", self._name, self._limits))
        try:
            await asyncio.shield(asking)
        except asyncio.CancelledError:
            # The client has left: what is let in nevertheless leaves at once.
            asking.add_done_callback(self._leave_again)
            raise

    def _leave_again(self, asked: asyncio.Future[None]) -> None:
        if asked.exception() is None:
            self.leave()

    def leave(self) -> None:
        self._link.tell("leave", self._name)

    def charge(self, tokens: int) -> None:
        self._link.tell("charge", self._name, tokens)

    async def headers(self) -> dict[str, str]:
        if self._link.is_lost or not self._is_known:
            return {}
        return await self._link.call("headers", self._name)
