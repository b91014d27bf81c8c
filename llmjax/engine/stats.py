"""What an engine says of itself when somebody scrapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True)
class EngineStats:
    """A moment of the engine, for metrics.

    Attributes:
        num_running, num_waiting: sequences.
        num_queued: requests that wait, of which there are at most `max_queue_len`.
        pages_used, pages_cached, pages_free: held by sequences; remembered and to be had
            again; empty.
        prefix_queries, prefix_hits: tokens of sequences admitted, and those of them that the
            prefix cache had.
        pages_saved, pages_loaded: moved to host memory, and back.
        host_pages, host_pages_used: that host memory has room for, and that it holds.
        page_bytes: of a page, in all layers.
        num_held: requests whose prompts prefill workers compute; they wait as well.
        workers_up: prefill workers that are there.
    """

    num_running: int
    num_waiting: int
    num_queued: int
    pages_used: int
    pages_cached: int
    pages_free: int
    prefix_queries: int
    prefix_hits: int
    pages_saved: int
    pages_loaded: int
    host_pages: int
    host_pages_used: int
    page_bytes: int
    num_preemptions: int
    padded_tokens: int
    bucket_tokens: int
    num_held: int
    workers_up: int

    @classmethod
    def total(cls, engines: Sequence[EngineStats]) -> EngineStats:
        """Of several that run the same model."""
        names = [field.name for field in fields(cls)]
        sums = {name: sum(getattr(stats, name) for stats in engines) for name in names}
        return cls(**{**sums, "page_bytes": engines[0].page_bytes})

    @classmethod
    def of(cls, engine: Engine) -> EngineStats:
        scheduler, cache, host = engine.scheduler, engine.cache, engine.host
        handover = engine.handover
        return cls(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_queued=scheduler.num_queued,
            pages_used=cache.num_used,
            pages_cached=cache.num_cached,
            pages_free=cache.pool.num_free,
            prefix_queries=cache.stats.queried,
            prefix_hits=cache.stats.hit,
            pages_saved=host.num_saved if host is not None else 0,
            pages_loaded=host.num_loaded if host is not None else 0,
            host_pages=host.num_slots if host is not None else 0,
            host_pages_used=host.num_used if host is not None else 0,
            page_bytes=engine.page_bytes,
            num_preemptions=scheduler.num_preemptions,
            padded_tokens=scheduler.padded_tokens,
            bucket_tokens=scheduler.bucket_tokens,
            num_held=handover.num_held if handover is not None else 0,
            workers_up=handover.num_up if handover is not None else 0,
        )
