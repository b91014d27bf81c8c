"""The server's one log line an interval, with vLLM's words."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmjax.engine.async_engine import AsyncEngine
    from llmjax.engine.pooling import PoolingEngine

logger = logging.getLogger(__name__)


class StatsLog:
    """Says what has happened since it last did."""

    def __init__(self, engine: AsyncEngine):
        self._engine = engine
        self._time = time.monotonic()
        self._hit_rate = 0.0
        self._totals = self._read()

    def line(self) -> str | None:
        """The line, or None where nothing runs or waits and nothing has since the last one."""
        now, totals = time.monotonic(), self._read()
        seconds, self._time = max(now - self._time, 1e-9), now
        new = {name: value - self._totals.get(name, 0) for name, value in totals.items()}
        self._totals = totals
        stats = self._engine.stats()
        if not (any(new.values()) or stats.num_running or stats.num_waiting):
            return None
        if new["queries"]:
            self._hit_rate = new["hits"] / new["queries"]
        pages = stats.pages_used + stats.pages_cached + stats.pages_free
        padding = new["padded"] / max(1, new["bucket"])
        return (
            f"Avg prompt throughput: {new['prompt_tokens_total'] / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {new['generation_tokens_total'] / seconds:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            f"KV cache usage: {stats.pages_used / pages:.1%}, "
            f"Prefix cache hit rate: {self._hit_rate:.1%}, "
            f"Preemptions: {new['preemptions']:.0f}, "
            f"Swapped: {new['saved']:.0f} pages out, {new['loaded']:.0f} in, "
            f"Padding: {padding:.1%}"
        )

    def _read(self) -> dict[str, float]:
        stats = self._engine.stats()
        return {
            **self._engine.metrics.totals(),
            "queries": stats.prefix_queries,
            "hits": stats.prefix_hits,
            "preemptions": stats.num_preemptions,
            "saved": stats.pages_saved,
            "loaded": stats.pages_loaded,
            "padded": stats.padded_tokens,
            "bucket": stats.bucket_tokens,
        }


class PoolingLog:
    """Says what an engine that embeds or scores has done since it last did."""

    def __init__(self, engine: PoolingEngine):
        self._engine = engine
        self._time = time.monotonic()
        self._before = self._read()

    def line(self) -> str | None:
        """The line, or None where there is nothing to do and has not been since the last one."""
        now, totals = time.monotonic(), self._read()
        seconds, self._time = max(now - self._time, 1e-9), now
        tokens, bucket, padded = (a - b for a, b in zip(totals, self._before, strict=True))
        self._before = totals
        if not (bucket or self._engine.num_requests):
            return None
        return (
            f"Avg prompt throughput: {tokens / seconds:.1f} tokens/s, "
            f"Running: {self._engine.num_running} reqs, "
            f"Waiting: {self._engine.num_waiting} reqs, Padding: {padded / max(1, bucket):.1%}"
        )

    def _read(self) -> tuple[float, float, float]:
        tokens = self._engine.metrics.totals()["prompt_tokens_total"]
        return tokens, self._engine.bucket_tokens, self._engine.padded_tokens


@asynccontextmanager
async def logged_stats(engine: AsyncEngine | PoolingEngine, interval: float) -> AsyncIterator[None]:
    """Logs a line every `interval` seconds; 0 is never."""
    from llmjax.engine.pooling import PoolingEngine

    lines = PoolingLog(engine) if isinstance(engine, PoolingEngine) else StatsLog(engine)
    task = asyncio.ensure_future(_log(lines, interval)) if interval else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _log(log: StatsLog | PoolingLog, interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        line = log.line()
        if line is not None:
            logger.info(line)
