"""OpenTelemetry spans of requests, with vLLM's names, where the server is told to send them.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/ and vLLM's `SpanAttributes`, which has
names for what that lacks.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from llmjax.errors import ConfigError

from .config import ServerConfig
from .generation import Job, Stopwatch
from .request_id import REQUEST_ID

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""Environment variables that say how spans are sent; the first that is set counts."""


class Trace(ABC):
    """What is told of one HTTP request, to which spans belong."""

    @abstractmethod
    def generated(self, job: Job, watch: Stopwatch) -> None:
        """A prompt's answer has ended, or failed."""

    @abstractmethod
    def pooled(self, num_tokens: int, arrival: float) -> None:
        """Texts were embedded or scored."""


class NoTrace(Trace):
    def generated(self, job: Job, watch: Stopwatch) -> None:
        pass

    def pooled(self, num_tokens: int, arrival: float) -> None:
        pass


class Spans:
    """Makes spans.

    Args:
        provider: what they go through.
        model: its name.
    """

    def __init__(self, provider: TracerProvider, model: str):
        self.provider, self._model = provider, model
        self._tracer = provider.get_tracer("llmjax")

    def trace(self, headers: Mapping[str, str], request_id: str) -> Trace:
        """Of a request, as a part of what its `traceparent` names."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Names of headers are in lower case for it.
        carrier = {name.lower(): value for name, value in headers.items()}
        context = TraceContextTextMapPropagator().extract(carrier)
        return SpanTrace(self, context, request_id)

    def end(
        self,
        context: Context,
        arrival: float,
        attributes: Mapping[str, Any],
        error: Exception | None = None,
    ) -> None:
        """One that began at `arrival` (`time.monotonic`) and ends now."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=context,
            kind=SpanKind.SERVER,
            attributes={"gen_ai.response.model": self._model, **attributes},
            start_time=now - int((time.monotonic() - arrival) * 1e9),
        )
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end(now)


class SpanTrace(Trace):
    def __init__(self, spans: Spans, context: Context, request_id: str):
        self._spans, self._context, self._request_id = spans, context, request_id

    def generated(self, job: Job, watch: Stopwatch) -> None:
        params = job.params
        attributes: dict[str, Any] = {
            "gen_ai.request.id": job.request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": len(job.token_ids),
            "gen_ai.usage.completion_tokens": watch.num_tokens,
            "gen_ai.response.finish_reasons": watch.finish_reasons,
            "gen_ai.latency.e2e": time.monotonic() - watch.arrival,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if watch.began:
            attributes["gen_ai.latency.time_in_queue"] = watch.began - watch.arrival
        if watch.first:
            attributes["gen_ai.latency.time_to_first_token"] = watch.first - watch.arrival
        if watch.began and watch.first:
            attributes["gen_ai.latency.time_in_model_prefill"] = watch.first - watch.began
            attributes["gen_ai.latency.time_in_model_decode"] = watch.last - watch.first
            attributes["gen_ai.latency.time_in_model_inference"] = watch.last - watch.began
        self._spans.end(self._context, watch.arrival, attributes, watch.error)

    def pooled(self, num_tokens: int, arrival: float) -> None:
        attributes = {
            "gen_ai.request.id": self._request_id,
            "gen_ai.usage.prompt_tokens": num_tokens,
            "gen_ai.latency.e2e": time.monotonic() - arrival,
        }
        self._spans.end(self._context, arrival, attributes)


SPANS = web.AppKey("spans", Spans)


def trace_of(request: web.Request) -> Trace:
    """What the handler of a request tells of it."""
    spans = request.app.get(SPANS)
    return NoTrace() if spans is None else spans.trace(request.headers, request[REQUEST_ID])


def make_spans(config: ServerConfig, model: str) -> Spans | None:
    """Spans that are sent in the background; None where nobody wants them.

    Raises:
        ConfigError: OpenTelemetry is not installed, or does not know the protocol.
    """
    if config.otlp_traces_endpoint is None:
        return None
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(config.otlp_traces_endpoint)
    except ImportError as error:
        raise ConfigError(
            "otlp_traces_endpoint needs OpenTelemetry, which is not installed: pip install "
            f"'llmjax[otel]' ({error})"
        ) from error
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Spans(provider, model)


def _exporter(endpoint: str) -> Any:
    protocol = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http(endpoint=endpoint)
    raise ConfigError(f"{PROTOCOLS[0]} is {protocol!r}, allowed: grpc, http/protobuf")


def _resource() -> Any:
    """What the environment says of this service; its name is ours where that says none."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    told = Resource.create()
    if str(told.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return told.merge(Resource({SERVICE_NAME: "llmjax"}))
    return told


async def export_spans(app: web.Application) -> AsyncIterator[None]:
    """For `cleanup_ctx`: what has not been sent is, at the end."""
    yield
    await asyncio.to_thread(app[SPANS].provider.shutdown)
