"""The text of /metrics: what the engine has observed, and its gauges at this moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from llmjax.engine.async_engine import AsyncEngine
    from llmjax.engine.engine import EngineStats


class StatsCollector(Collector):
    """One snapshot of `EngineStats` as metric families."""

    def __init__(self, stats: EngineStats, model_name: str):
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        s = self._stats
        pages = s.pages_used + s.pages_cached + s.pages_free
        gauges = {
            "num_requests_running": (s.num_running, "Sequences that run."),
            "num_requests_waiting": (s.num_waiting, "Sequences that wait to run."),
            "kv_cache_usage_perc": (s.pages_used / pages, "Share of KV pages in use, 0 to 1."),
            "kv_cache_pages_used": (s.pages_used, "KV pages in use."),
            "kv_cache_pages_cached": (s.pages_cached, "KV pages of the prefix cache alone."),
            "kv_cache_pages_free": (s.pages_free, "KV pages free."),
        }
        counters = {
            "num_preemptions": (s.num_preemptions, "Sequences preempted for want of pages."),
            "prefix_cache_queries": (s.prefix_queries, "Prompt tokens looked up."),
            "prefix_cache_hits": (s.prefix_hits, "Of these, in the prefix cache."),
            "pages_saved": (s.pages_saved, "KV pages moved to host memory."),
            "pages_loaded": (s.pages_loaded, "KV pages brought back."),
            "step_bucket_tokens": (s.bucket_tokens, "Tokens computed in steps, padding too."),
            "step_padded_tokens": (s.padded_tokens, "Of these, padding."),
        }
        for family, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (value, text) in values.items():
                metric = family(f"llmjax:{name}", text, labels=["model_name"])
                metric.add_metric([self._model_name], value)
                yield metric


def render(engine: AsyncEngine, model_name: str) -> bytes:
    """All metrics in Prometheus's text format."""
    now = CollectorRegistry()
    now.register(StatsCollector(engine.stats(), model_name))
    ProcessCollector(registry=now)
    return generate_latest(engine.metrics.registry) + generate_latest(now)
