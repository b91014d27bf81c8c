"""Files that are read again as they change."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

WATCH_SECONDS = 1.0


@asynccontextmanager
async def watched(paths: Sequence[str], on_change: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `on_change`, in a thread, within about `WATCH_SECONDS` of a change to a file."""
    task = asyncio.ensure_future(_watch(paths, on_change))
    try:
        yield
    finally:
        task.cancel()


async def _watch(paths: Sequence[str], on_change: Callable[[], None]) -> None:
    before = _signature(paths)
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        now = await asyncio.to_thread(_signature, paths)
        if now != before:
            before = now
            await asyncio.to_thread(on_change)


def _signature(paths: Sequence[str]) -> list[tuple[int, int, int] | None]:
    """What differs once a file has been written or replaced."""
    signature: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError:
            signature.append(None)
        else:
            signature.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return signature
