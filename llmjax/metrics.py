"""What an engine and its server measure, under vLLM's names with the prefix `llmjax:`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

M = TypeVar("M", bound=MetricWrapperBase)

LABELS = ("model_name", "engine")
"""Of everything; `engine` numbers the replicas, from 0."""

# vLLM's bucket edges, so that dashboards made for it fit.
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(2**i) for i in range(18))


Labels = tuple[tuple[str, str], ...]
Told = Iterable[tuple[str, Labels, float]]
"""Samples of counters and histograms: name, labels, value."""


class Metrics(Collector):
    """Counters and histograms of a model's engines, in a registry of their own.

    What `EngineStats` counts is not here: it is read when somebody scrapes. Collecting adds what
    other processes have counted of the same.

    Args:
        engine: the label of what is counted here.
        beside: that of another engine, into whose registry this goes.
    """

    def __init__(self, model_name: str, engine: int = 0, beside: Metrics | None = None):
        self.registry: CollectorRegistry = beside.registry if beside else CollectorRegistry()
        self._families: dict[str, Any] = beside._families if beside else {}
        self._engines: dict[int, Metrics] = beside._engines if beside else {}
        self._engines[engine] = self
        self._elsewhere: dict[Hashable, Told] = beside._elsewhere if beside else {}
        self._labels = (model_name, str(engine))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = self._family(
            Counter, "request_success", "Choices finished, by reason.", "finished_reason"
        )
        self.prefill_tokens = self._counter(
            "step_prefill_tokens", "Tokens of prompts, or computed again, in steps."
        )
        self.decode_tokens = self._counter("step_decode_tokens", "Tokens of decodes in steps.")
        self.steps_failed = self._counter("steps_failed", "Steps that failed.")
        self.requests_failed = self._counter(
            "requests_failed", "Requests that ended because a step failed."
        )
        self.compiled_programs = self._counter("compiled_programs", "Step programs compiled.")
        self.compile_seconds = self._counter(
            "compile_seconds", "Time that compiling step programs took."
        )
        self.iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens in an engine step.", TOKENS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Time a request waited to run.", LATENCY
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "Time from running to the first token.", LATENCY
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "Time from the first token to the last.", LATENCY
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", FIRST_TOKEN
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens.", TOKEN_GAP
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after a request's first.",
            TOKEN_GAP,
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end.", LATENCY
        )
        self.prefill_jobs = self._counter("prefill_jobs", "Prompts sent to prefill workers.")
        self.prefill_failures = self._counter(
            "prefill_jobs_failed", "Prompts computed here although they were held for a worker."
        )
        self.prefill_pages = self._counter("prefill_pages", "KV pages from prefill workers.")
        self.prefill_bytes = self._counter("prefill_bytes", "Bytes of KV pages from workers.")
        self.prefill_handover = self._histogram(
            "prefill_handover_seconds", "Time from arrival until a worker's pages came.", LATENCY
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", TOKENS
        )

    def count_finished(self, reason: str) -> None:
        """Counts a choice that ended by "stop", "length", "abort" or "error"."""
        self._success.labels(*self._labels, reason).inc()

    def of(self, engine: int) -> Metrics:
        """Those of one of the engines."""
        return self._engines[engine]

    def collect(self) -> Iterator[Metric]:
        """All families, what was counted elsewhere included."""
        others: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        for told in self._elsewhere.values():
            for name, labels, value in told:
                others[name, labels] += value
        for family in self.registry.collect():
            family.samples = [
                s._replace(value=s.value + others.pop((s.name, _labels(s)), 0))
                for s in family.samples
            ]
            # What of this family is known elsewhere alone.
            for name, labels in [key for key in others if key[0] == f"{family.name}_total"]:
                family.samples.append(Sample(name, dict(labels), others.pop((name, labels))))
            yield family

    def tell(self) -> list[tuple[str, Labels, float]]:
        """What has been counted here, for `take` of another process."""
        return [
            (s.name, _labels(s), s.value)
            for family in self.registry.collect()
            for s in family.samples
            if s.value and not s.name.endswith("_created")
        ]

    def take(self, source: Hashable, told: Told) -> None:
        """What another process has counted since its start; the last word of each source counts."""
        self._elsewhere[source] = told

    def totals(self, engine: int | None = None) -> dict[str, float]:
        """Counters, and sums and counts of histograms, since the start, without the prefix.

        Args:
            engine: that of which they are; None is all of them together.
        """
        totals: defaultdict[str, float] = defaultdict(float)
        for metric in self.collect():
            for sample in metric.samples:
                is_total = sample.name.endswith(("_total", "_sum", "_count"))
                is_asked = engine is None or sample.labels.get("engine") == str(engine)
                if is_total and is_asked and sample.labels.keys() == set(LABELS):
                    totals[sample.name.removeprefix("llmjax:")] += sample.value
        return dict(totals)

    def _counter(self, name: str, text: str) -> Counter:
        return self._family(Counter, name, text).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._family(Histogram, name, text, buckets=buckets).labels(*self._labels)

    def _family(self, kind: type[M], name: str, text: str, *labels: str, **options: Any) -> M:
        if name not in self._families:
            self._families[name] = kind(
                f"llmjax:{name}", text, [*LABELS, *labels], registry=self.registry, **options
            )
        return self._families[name]


def _labels(sample: Sample) -> Labels:
    return tuple(sorted(sample.labels.items()))
