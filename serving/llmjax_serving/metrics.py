"""The text of /metrics: what the engine has observed, and its gauges at this moment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from llmjax.metrics import LABELS

if TYPE_CHECKING:
    from llmjax.engine.async_engine import AsyncEngine
    from llmjax.engine.stats import EngineStats


class StatsCollector(Collector):
    """One snapshot of each engine's `EngineStats` as metric families, and `more` of them."""

    def __init__(self, engines: Sequence[EngineStats], model_name: str, *more: Metric):
        self._engines = engines
        self._model_name = model_name
        self._more = more

    def collect(self) -> Iterator[Metric]:
        yield from self._more
        told = [_values(stats) for stats in self._engines]
        for kind, family in enumerate((GaugeMetricFamily, CounterMetricFamily)):
            for name, (_, text) in told[0][kind].items():
                metric = family(f"llmjax:{name}", text, labels=LABELS)
                for number, values in enumerate(told):
                    metric.add_metric([self._model_name, str(number)], values[kind][name][0])
                yield metric


Values = dict[str, tuple[float, str]]
"""Value and help of each metric, by name."""


def _values(s: EngineStats) -> tuple[Values, Values]:
    """Gauges and counters."""
    pages = s.pages_used + s.pages_cached + s.pages_free
    gauges: Values = {
        "num_requests_running": (s.num_running, "Sequences that run."),
        "num_requests_waiting": (s.num_waiting, "Sequences that wait to run."),
        "kv_cache_usage_perc": (s.pages_used / pages, "Share of KV pages in use, 0 to 1."),
        "kv_cache_pages_used": (s.pages_used, "KV pages in use."),
        "kv_cache_pages_cached": (s.pages_cached, "KV pages of the prefix cache alone."),
        "kv_cache_pages_free": (s.pages_free, "KV pages free."),
        "host_pages": (s.host_pages, "KV pages that host memory has room for."),
        "host_pages_used": (s.host_pages_used, "KV pages in host memory."),
        "num_requests_held": (s.num_held, "Requests that wait for a prefill worker."),
        "prefill_workers_up": (s.workers_up, "Prefill workers that are there."),
    }
    counters: Values = {
        "num_preemptions": (s.num_preemptions, "Sequences preempted for want of pages."),
        "prefix_cache_queries": (s.prefix_queries, "Prompt tokens looked up."),
        "prefix_cache_hits": (s.prefix_hits, "Of these, in the prefix cache."),
        "pages_saved": (s.pages_saved, "KV pages moved to host memory."),
        "pages_loaded": (s.pages_loaded, "KV pages brought back."),
        "kv_offload_store_bytes": (
            s.pages_saved * s.page_bytes,
            "Bytes moved to host memory.",
        ),
        "kv_offload_load_bytes": (s.pages_loaded * s.page_bytes, "Bytes brought back."),
        "step_bucket_tokens": (s.bucket_tokens, "Tokens computed in steps, padding too."),
        "step_padded_tokens": (s.padded_tokens, "Of these, padding."),
    }
    return gauges, counters


def cache_config(engine: AsyncEngine, stats: EngineStats) -> InfoMetricFamily:
    """What dashboards multiply shares of pages with, under vLLM's names; of the first engine,
    as the others are alike."""
    cache = engine.config.cache
    values = {
        "block_size": cache.block_size,
        "num_gpu_blocks": stats.pages_used + stats.pages_cached + stats.pages_free,
        "num_cpu_blocks": stats.host_pages,
        "cache_dtype": cache.kv_cache_dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
    }
    info = {name: str(value) for name, value in values.items()}
    return InfoMetricFamily("llmjax:cache_config", "How the KV pool is made.", info)


def render(engine: AsyncEngine, model_name: str, alias: str | None = None) -> bytes:
    """All metrics of an engine that generates, as `exposed` writes them."""
    now, stats = CollectorRegistry(), engine.stats_of_each()
    now.register(StatsCollector(stats, model_name, cache_config(engine, stats[0])))
    return exposed([engine.metrics, now], alias)


def exposed(collectors: Sequence[Collector], alias: str | None = None) -> bytes:
    """These and the process's in Prometheus's text format.

    Args:
        alias: a prefix under which all of llmjax's are told a second time.
    """
    ours = b"".join(map(generate_latest, collectors))
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    again = b""
    if alias is not None:
        # A line starts with a name, or with a comment that does: labels stay as they are.
        again = re.sub(rb"^(# \w+ )?llmjax:", rb"\g<1>%b:" % alias.encode(), ours, flags=re.M)
    return ours + again + generate_latest(process)
