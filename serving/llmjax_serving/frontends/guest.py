"""A frontend as the engine's process knows it: what it asks for, and what it is told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from llmjax.errors import LlmjaxError
from llmjax.request import Request, SequenceDelta

from ..accounts import LEDGER, LIMITER
from ..keys import ApiKey
from ..ledger import Used
from ..limits import Account
from .link import Handlers, Link
from .wire import delta_out, error_out, request_in

if TYPE_CHECKING:
    from llmjax.engine.async_engine import AsyncEngine
    from llmjax.engine.pooling import PoolingEngine

MOST_BACKLOG = 256 * 2**20
"""Bytes that a frontend may leave unread. It reads whatever clients do: it hangs."""


@dataclass(eq=False)
class _Open:
    """A request that has not ended, and how many of its choices have not."""

    request: Request
    left: int


class Guest:
    """Sends the engine what a frontend asks for. As a guest of `EngineThread`, that thread's.

    Args:
        name: that no other frontend has or had.
        app: keeps the accounts.
        on_hung: called where the frontend does not read.
    """

    def __init__(self, name: str, app: web.Application, on_hung: Callable[[], None]):
        self.name, self._app, self._on_hung = name, app, on_hung
        self.link: Link | None = None
        self.num_active = 0
        self._loop = asyncio.get_running_loop()
        self._engine: AsyncEngine | PoolingEngine | None = None
        self._prefix = ""
        self._open: dict[str, _Open] = {}
        self._accounts: dict[str, Account] = {}
        self._entered: Counter[str] = Counter()

    @property
    def handlers(self) -> Handlers:
        return {
            "submit": self._submit,
            "end": self._end,
            "cut": self._cut,
            "pool": self._pool,
            "enter": self._enter,
            "leave": self._leave,
            "charge": self._charge,
            "headers": self._headers,
            "report": self.take_report,
        }

    def serve(self, engine: AsyncEngine | PoolingEngine) -> None:
        """Computes with it what the frontend sends from now on."""
        from llmjax.engine.async_engine import AsyncEngine

        self._engine = engine
        if isinstance(engine, AsyncEngine):
            self._prefix = engine.thread.join(self)

    def depart(self) -> None:
        """The frontend has gone: nothing of it goes on."""
        for request_id in list(self._open):
            self._thread.end(request_id)
        if self._prefix:
            self._thread.leave(self._prefix)
        for name, times in self._entered.items():
            for _ in range(times):
                self._accounts[name].leave()
        self._entered.clear()
        self.num_active = 0

    # What the engine's thread tells

    @property
    def num_requests(self) -> int:
        return len(self._open)

    def publish(self, deltas: list[SequenceDelta]) -> list[tuple[str, int]]:
        told, start = [], len(self._prefix)
        for delta in deltas:
            one = self._open.get(delta.request_id)
            if one is None:
                continue
            told.append(delta_out(delta, delta.request_id[start:], one.request))
            if delta.finish_reason is not None:
                one.left -= 1
                if not one.left:
                    del self._open[delta.request_id]
        if told:
            self._tell("news", told)
        return []

    def refuse(self, request_id: str, error: LlmjaxError) -> None:
        self._open.pop(request_id, None)
        self._tell("refused", request_id[len(self._prefix) :], error_out(error))

    def fail(self, error: LlmjaxError) -> None:
        self._open.clear()
        self._tell("failed_all", error_out(error))

    def _tell(self, name: str, *arguments: Any) -> None:
        with suppress(RuntimeError):  # the event loop is closed: it is the end
            self._loop.call_soon_threadsafe(self._tell_now, name, *arguments)

    def _tell_now(self, name: str, *arguments: Any) -> None:
        if self.link is not None:
            self.link.tell(name, *arguments)
            if self.link.backlog > MOST_BACKLOG:
                self._on_hung()

    # What the frontend asks for

    @property
    def _thread(self) -> Any:
        return self._engine.thread  # type: ignore[union-attr]

    def _submit(self, *told: Any) -> None:
        engine: Any = self._engine
        request = request_in(self._prefix, engine.tokenizer.eos_token_ids, *told)
        self._open[request.id] = _Open(request, request.params.n)
        engine.thread.submit(request)

    def _end(self, request_id: str, index: int | None = None) -> None:
        self._thread.end(self._prefix + request_id, index)

    def _cut(self, request_id: str) -> bool:
        """Ends a request, and tells whether it has begun."""
        one = self._open.get(self._prefix + request_id)
        self._end(request_id)
        return one is None or one.request.began > 0  # it has ended meanwhile

    async def _pool(self, inputs: tuple[Any, ...]) -> list[bytes]:
        from llmjax.engine.pooling_inputs import PoolingInput

        engine: Any = self._engine
        texts = [PoolingInput(list(ids), list(types), *more) for ids, types, *more in inputs]
        return [vector.tobytes() for vector in await engine.run(texts)]

    async def _enter(self, name: str, limits: dict[str, int | None]) -> None:
        key = ApiKey(name=name, digest=b"", **limits)  # type: ignore[arg-type]
        account = self._accounts[name] = self._app[LIMITER].account(key)
        await account.enter()
        self._entered[name] += 1

    def _leave(self, name: str) -> None:
        self._entered[name] -= 1
        self._accounts[name].leave()

    def _charge(self, name: str, tokens: int) -> None:
        self._accounts[name].charge(tokens)

    async def _headers(self, name: str) -> dict[str, str]:
        return await self._accounts[name].headers()

    def take_report(
        self, counted: tuple[Any, ...], rows: tuple[tuple[Any, Any], ...], num_active: int
    ) -> None:
        """What it has counted since its start, what was used since its last report, and its
        requests at hand."""
        self.num_active = num_active
        self._app[LEDGER].put((row, Used(*used)) for row, used in rows)
        if self._engine is not None:
            self._engine.metrics.take(self.name, counted)
