"""The page at /dashboard: fixed files, and the state of the engine that they draw."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from aiohttp import web

from llmjax.checks import shown
from llmjax.errors import InvalidRequestError

from .state import STATE, ServerState

WEB = Path(__file__).parent / "web"
PAGE = {
    "/dashboard": ("dashboard.html", "text/html"),
    "/dashboard/dashboard.css": ("dashboard.css", "text/css"),
    "/dashboard/dashboard.js": ("dashboard.js", "text/javascript"),
}
"""What a browser loads before it can send a key: files that tell nothing of this server."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
}
MAX_AGE = 0.5
"""Seconds for which one snapshot is shown to all who look."""


class Snapshots:
    """Each engine's state as JSON text, taken at most every MAX_AGE seconds."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._taken: dict[int, tuple[float, str]] = {}

    async def get(self, state: ServerState, number: int) -> str:
        engine = state.loaded_engine()
        async with self._lock:
            at, text = self._taken.get(number, (float("-inf"), ""))
            if time.monotonic() - at > MAX_AGE:
                told = await engine.snapshot(number)
                told["engine"], told["engines"] = number, engine.config.parallel.data_parallel_size
                told["totals"] = engine.metrics.totals(number)
                told["time"], told["draining"] = time.time(), state.draining
                text = json.dumps(told, separators=(",", ":"))
                self._taken[number] = time.monotonic(), text
            return text


SNAPSHOTS = web.AppKey("snapshots", Snapshots)


async def page(request: web.Request) -> web.Response:
    name, content_type = PAGE[request.path]
    text = (WEB / name).read_text(encoding="utf-8")
    return web.Response(text=text, content_type=content_type, charset="utf-8", headers=HEADERS)


async def state(request: web.Request) -> web.Response:
    """What `?engine=NUMBER` holds and runs, by default the first."""
    state, asked = request.app[STATE], request.query.get("engine", "0")
    engines = state.loaded_engine().config.parallel.data_parallel_size
    if not (asked.isascii() and asked.isdigit() and int(asked) < engines):
        allowed = f"engine is {shown(asked)}, allowed: 0 to {engines - 1}"
        raise InvalidRequestError(allowed, param="engine")
    text = await request.app[SNAPSHOTS].get(state, int(asked))
    headers = {"Cache-Control": "no-store"}
    return web.Response(text=text, content_type="application/json", headers=headers)
