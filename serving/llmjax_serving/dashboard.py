"""The state of the engine that the page at /dashboard draws."""

from __future__ import annotations

import asyncio
import json
import time

from aiohttp import web

from llmjax.checks import shown
from llmjax.errors import InvalidRequestError

from .state import STATE, ServerState

MAX_AGE = 0.5
"""Seconds for which one snapshot is shown to all who look."""


class Snapshots:
    """Each engine's state as JSON text, taken at most every MAX_AGE seconds."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._taken: dict[int, tuple[float, str]] = {}

    async def get(self, state: ServerState, number: int) -> str:
        engine = state.own_engine()
        async with self._lock:
            at, text = self._taken.get(number, (float("-inf"), ""))
            if time.monotonic() - at > MAX_AGE:
                told = await engine.snapshot(number)
                await state.gather()
                told["engine"], told["engines"] = number, engine.config.parallel.data_parallel_size
                told["totals"] = engine.metrics.totals(number)
                told["time"], told["draining"] = time.time(), state.draining
                text = json.dumps(told, separators=(",", ":"))
                self._taken[number] = time.monotonic(), text
            return text


SNAPSHOTS = web.AppKey("snapshots", Snapshots)


async def state(request: web.Request) -> web.Response:
    """What `?engine=NUMBER` holds and runs, by default the first."""
    state, asked = request.app[STATE], request.query.get("engine", "0")
    engines = state.loaded_engine().config.parallel.data_parallel_size
    numbers = {str(number): number for number in range(engines)}
    if asked not in numbers:
        allowed = f"engine is {shown(asked)}, allowed: 0 to {engines - 1}"
        raise InvalidRequestError(allowed, param="engine")
    text = await request.app[SNAPSHOTS].get(state, numbers[asked])
    headers = {"Cache-Control": "no-store"}
    return web.Response(text=text, content_type="application/json", headers=headers)
