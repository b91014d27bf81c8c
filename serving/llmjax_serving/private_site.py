"""The app behind a socket that only this process and its own know."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

BASE = "http://llmjax"
"""Of URLs; where they go is the connector's to know."""


@asynccontextmanager
async def private_site(runner: web.AppRunner) -> AsyncIterator[str]:
    """The path of a socket at which the app of a runner that has been set up answers."""
    with tempfile.TemporaryDirectory(prefix="llmjax-") as folder:
        path = str(Path(folder) / "socket")  # nobody else may enter the folder
        site = web.UnixSite(runner, path)
        await site.start()
        yield path
        await site.stop()


@asynccontextmanager
async def private_session(runner: web.AppRunner) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose requests are answered by the app of a runner that has been set up."""
    async with private_site(runner) as path:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.UnixConnector(path, limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            yield session
