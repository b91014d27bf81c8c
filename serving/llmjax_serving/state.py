"""What the routes share: the engine once it is there, and where the server stands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from aiohttp import web

from llmjax.pooled import cannot_generate, cannot_pool

from .config import ServerConfig
from .engines import TextClient, VectorClient
from .errors import Handler, unavailable
from .schema.sampling import Limits

if TYPE_CHECKING:
    from llmjax.engine.async_engine import AsyncEngine
    from llmjax.engine.pooling import PoolingEngine

    from .frontends.supervisor import Frontends

T = TypeVar("T")

SMALL = 2048
"""Of that size no text takes the tokenizer longer than a fraction of a millisecond."""


@dataclass
class ServerState:
    """Attributes:
    model_name: what clients call the model.
    engine: of a model that generates; None until it is loaded.
    pooling: of one that embeds or scores.
    draining: no new requests are taken.
    active: handlers that generate.
    frontends: where others take the requests of clients; None where this process does.
    pool: threads that tokenise, so that the event loop does not.
    slow_pool: threads for what a client may make as slow as its limits let it be, so that
        nobody else's texts wait behind it.
    """

    model_name: str
    config: ServerConfig
    engine: TextClient | None = None
    pooling: VectorClient | None = None
    draining: bool = False
    active: set[asyncio.Task[Any]] = field(default_factory=set)
    frontends: Frontends | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(4, thread_name_prefix="tokenise")
    )
    slow_pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="slow")
    )

    def put(self, engine: AsyncEngine | PoolingEngine) -> None:
        """Serves with it from now on."""
        from llmjax.engine.pooling import PoolingEngine

        if isinstance(engine, PoolingEngine):
            self.pooling = engine
        else:
            self.engine = engine
        if self.frontends is not None:
            self.frontends.serve(engine)

    def loaded(self) -> TextClient | VectorClient:
        """The engine of either kind. Raises ApiError (503) while the model is loading."""
        engine = self.engine or self.pooling
        if engine is None:
            raise unavailable("the model is loading", "loading")
        return engine

    def ready(self) -> TextClient | VectorClient:
        """The engine of either kind. Raises ApiError (503) while no new requests are taken."""
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        return self.loaded()

    def loaded_engine(self) -> TextClient:
        """The engine that generates; raises as `loaded`, or InvalidRequestError: there is none."""
        self.loaded()
        if self.pooling is not None:
            raise cannot_generate(self.model_name, self.pooling.task)
        assert self.engine is not None
        return self.engine

    def ready_engine(self) -> TextClient:
        """The engine that generates; raises as `ready`, or InvalidRequestError: there is none."""
        self.ready()
        return self.loaded_engine()

    def own_engine(self) -> AsyncEngine:
        """That of this process, for routes that no other answers; raises as `loaded_engine`."""
        return cast("AsyncEngine", self.loaded_engine())

    def pooling_engine(self) -> VectorClient:
        """That which embeds or scores; raises as `ready`, or InvalidRequestError: there is none."""
        self.ready()
        if self.pooling is None:
            raise cannot_pool(self.model_name)
        return self.pooling

    @property
    def limits(self) -> Limits:
        engine = self.ready()
        return Limits(
            vocab_size=engine.vocab_size,
            max_logprobs=engine.config.max_logprobs,
            max_prompts=engine.config.scheduler.max_queue_len,
            defaults=engine.generation_defaults,
            chat_templates=self.config.trust_request_chat_template,
        )

    async def gather(self) -> None:
        """Before anything is told that counts for all: has frontends say what they have counted."""
        if self.frontends is not None:
            await self.frontends.gather()

    @property
    def num_active(self) -> int:
        """Requests at hand, those of frontends too."""
        others = self.frontends.num_active if self.frontends is not None else 0
        return len(self.active) + others

    async def computed(self, size: int, work: Callable[..., T], *args: Any) -> T:
        """`work`, in a thread unless there is so little to do that the way there takes longer.

        Args:
            size: bytes, characters or tokens that it goes through.
        """
        return work(*args) if size <= SMALL else await self.in_thread(work, *args)

    async def in_thread(self, work: Callable[..., T], *args: Any, slow: bool = False) -> T:
        """`work`, in a thread: where it may be slow, in one of `slow_pool`."""
        pool = self.slow_pool if slow else self.pool
        return await asyncio.get_running_loop().run_in_executor(pool, work, *args)

    def close(self) -> None:
        """No thread begins anything more."""
        for pool in (self.pool, self.slow_pool):
            pool.shutdown(wait=False, cancel_futures=True)


STATE = web.AppKey("state", ServerState)


@web.middleware
async def active_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keeps count of POST handlers, which draining waits for."""
    if request.method != "POST":
        return await handler(request)
    state, task = request.app[STATE], asyncio.current_task()
    assert task is not None
    state.ready()
    state.active.add(task)
    try:
        return await handler(request)
    finally:
        state.active.discard(task)
