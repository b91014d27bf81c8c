"""What came of a simulation, in figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError
from .outcome import LIMITS, Outcome, Record, Timeline

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Slo:
    """What a request must keep to count as good.

    Attributes:
        ttft: seconds to its first token; None allows any.
        itl: seconds between its tokens, on average over the request; None allows any.
    """

    ttft: float | None = None
    itl: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "itl"):
            value = getattr(self, name)
            if value is not None and not 0 < value < np.inf:
                raise ConfigError(f"slo_{name}_ms is {1e3 * value:g}, allowed: above 0")

    def is_kept(self, record: Record) -> bool:
        return (self.ttft is None or record.ttft <= self.ttft) and (
            self.itl is None or record.mean_gap <= self.itl
        )


def report(outcome: Outcome, slo: Slo) -> dict[str, Any]:
    """The figures of one outcome; None where there is nothing to count.

    `page_use` and `kv_use` are means over the time in which requests waited, from when the
    first had to wait for memory: of memory that is taken, and of memory that holds keys and
    values. `page_use_when_short` is that of the part of this time in which it was memory that
    the next request lacked. They are None where no request ever waited for memory; `waits_for`
    says what held requests up, as shares of all time.
    """
    done = [record for record in outcome.records if record.refused is None]
    tokens = sum(record.tokens for record in done)
    prompts = sum(record.arrival.input_len for record in done)
    seconds = max((record.last for record in done), default=0.0)
    counts = outcome.counts
    has_slo = slo != Slo()
    good = sum(map(slo.is_kept, done))
    refused = Counter(record.refused for record in outcome.records if record.refused)
    return {
        "name": outcome.name,
        "requests": len(outcome.records),
        "refused": dict(refused),
        "seconds": seconds,
        "requests_per_second": _ratio(len(done), seconds),
        "goodput_requests_per_second": _ratio(good, seconds) if has_slo else None,
        "slo_kept": _ratio(good, len(outcome.records)) if has_slo else None,
        "prompt_tokens_per_second": _ratio(prompts, seconds),
        "output_tokens_per_second": _ratio(tokens, seconds),
        **_use(outcome.timelines),
        "preemptions_per_1000_requests": _ratio(1000 * counts.get("preemptions", 0), len(done)),
        "prefix_hit_rate": _ratio(counts.get("prefix_hits", 0), counts.get("prefix_queries", 0)),
        "padding": _ratio(counts.get("padded_tokens", 0), counts.get("bucket_tokens", 0)),
        "ttft_ms": percentiles([record.ttft for record in done]),
        "itl_ms": percentiles(outcome.gaps),
        "e2e_ms": percentiles([record.e2e for record in done]),
        "counts": counts,
        "steps": sum(len(line.start) for line in outcome.timelines),
        "scheduler_cpu_seconds": outcome.host_seconds,
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """In milliseconds, by nearest rank, and the mean."""
    if not len(seconds):
        return None
    times = 1e3 * np.asarray(seconds)
    ranked = np.percentile(times, PERCENTILES, method="inverted_cdf")
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, ranked, strict=True)}
    return {"mean": float(times.mean()), **named}


def _use(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Time-weighted means over all replicas."""
    taken = stored = running = waited = total = short = taken_when_short = 0.0
    limits = np.zeros(len(LIMITS))
    for line in timelines:
        if not len(line.start):
            continue
        seconds, limit = np.asarray(line.seconds), np.asarray(line.limit, dtype=int)
        limits += np.bincount(limit, seconds, len(LIMITS))
        total += seconds.sum()
        for_memory = limit == LIMITS.index("pages")
        if not for_memory.any():
            continue
        full = np.asarray(line.waiting) > 0
        full[: for_memory.argmax()] = False
        weights, used = seconds[full], np.asarray(line.used)
        waited += weights.sum()
        taken += weights @ used[full]
        short += seconds[for_memory].sum()
        taken_when_short += seconds[for_memory] @ used[for_memory]
        stored += weights @ np.asarray(line.stored)[full] / line.capacity
        running += weights @ np.asarray(line.running)[full]
    return {
        "page_use": _ratio(taken, waited),
        "page_use_when_short": _ratio(taken_when_short, short),
        "kv_use": _ratio(stored, waited),
        "running_at_saturation": _ratio(running, waited),
        "waits_for": {name: _ratio(s, total) for name, s in zip(LIMITS, limits, strict=True)},
    }


def table(reports: Sequence[dict[str, Any]]) -> str:
    """The reports side by side."""
    rows = [("", [r["name"] for r in reports])]

    def add(title: str, form: str, *path: str) -> None:
        values: list[Any] = list(reports)
        for name in path:
            values = [value[name] if value else None for value in values]
        if any(value is not None for value in values):
            rows.append((title, ["-" if v is None else format(v, form) for v in values]))

    add("requests", ",d", "requests")
    rows.append(("refused", [f"{sum(r['refused'].values()):,}" for r in reports]))
    add("seconds", ",.1f", "seconds")
    add("requests a second", ",.2f", "requests_per_second")
    add("  within the SLO", ",.2f", "goodput_requests_per_second")
    add("share within the SLO", ".1%", "slo_kept")
    add("output tokens a second", ",.0f", "output_tokens_per_second")
    add("prompt tokens a second", ",.0f", "prompt_tokens_per_second")
    add("memory taken at saturation", ".1%", "page_use")
    add("  while memory is short", ".1%", "page_use_when_short")
    add("  of all, with KV in it", ".1%", "kv_use")
    add("running at saturation", ",.1f", "running_at_saturation")
    for name in LIMITS[1:]:
        add(f"time waited for {name}", ".1%", "waits_for", name)
    add("preemptions per 1,000", ",.1f", "preemptions_per_1000_requests")
    for name in ("recomputed_tokens", "restored_tokens", "pages_saved", "pages_loaded"):
        values = [r["counts"].get(name) for r in reports]
        if any(values):
            title = f"  {name.replace('_', ' ')}"
            rows.append((title, ["-" if v is None else f"{v:,}" for v in values]))
    add("prefix hit rate", ".1%", "prefix_hit_rate")
    add("padding", ".1%", "padding")
    for title, name in (
        ("first token", "ttft_ms"),
        ("between tokens", "itl_ms"),
        ("whole request", "e2e_ms"),
    ):
        for p in PERCENTILES:
            add(f"{title}, p{p} ms", ",.0f", name, f"p{p}")
    width = max(17, *(len(name) + 2 for name in rows[0][1]))
    lines = [f"{title:<28}" + "".join(f"{v:>{width}}" for v in values) for title, values in rows]
    return "\n".join(line.rstrip() for line in lines)
