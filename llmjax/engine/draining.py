"""The end of an engine that takes no more requests."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Draining(Protocol):
    @property
    def num_requests(self) -> int: ...
    def stop(self) -> None: ...


async def wait_and_stop(engine: Draining, timeout: float) -> int:
    """Waits for the requests that there are, then stops.

    Returns:
        How many had not ended within `timeout` seconds and are cut off.
    """
    deadline = time.monotonic() + timeout
    while engine.num_requests and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    cut_off = engine.num_requests
    engine.stop()
    return cut_off
