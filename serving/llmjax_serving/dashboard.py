"""The state of the engine that the page at /dashboard draws."""

from __future__ import annotations

import asyncio
import json
import time

from aiohttp import web

from .state import STATE, ServerState

MAX_AGE = 0.5
"""Seconds for which one snapshot is shown to all who look."""


class Snapshots:
    """The engine's state as JSON text, taken at most every MAX_AGE seconds."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._taken = float("-inf")
        self._text = ""

    async def get(self, state: ServerState) -> str:
        engine = state.loaded_engine()
        async with self._lock:
            if time.monotonic() - self._taken > MAX_AGE:
                told = await engine.snapshot()
                told["totals"] = engine.metrics.totals()
                told["time"], told["draining"] = time.time(), state.draining
                self._text = json.dumps(told, separators=(",", ":"))
                self._taken = time.monotonic()
            return self._text


SNAPSHOTS = web.AppKey("snapshots", Snapshots)


async def state(request: web.Request) -> web.Response:
    text = await request.app[SNAPSHOTS].get(request.app[STATE])
    headers = {"Cache-Control": "no-store"}
    return web.Response(text=text, content_type="application/json", headers=headers)
