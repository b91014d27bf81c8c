"""OpenTelemetry spans of requests."""

from __future__ import annotations

import asyncio
import gzip
import sys
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from llmjax.errors import ConfigError, RequestFailedError
from llmjax_serving import tracing
from llmjax_serving.config import ServerConfig

from .double import MODEL, EngineDouble, client_of, run_async, until
from .test_embeddings import engine_of, served
from .test_metrics import make_engine

TRACED = ServerConfig(otlp_traces_endpoint="http://127.0.0.1:1")
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
LATENCIES = {
    f"gen_ai.latency.{name}"
    for name in (
        *("time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill"),
        *("time_in_model_decode", "time_in_model_inference"),
    )
}
"""As vLLM has them."""


@pytest.fixture
def exporter(monkeypatch):
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "_exporter", lambda endpoint: exporter)
    return exporter


def spans_of(exporter):
    """The attributes of each, once the server has ended."""
    return [dict(span.attributes) for span in exporter.get_finished_spans()]


def test_a_span_says_what_a_request_was(exporter):
    @run_async
    async def test():
        before = time.time_ns()
        async with client_of(EngineDouble(), TRACED) as client:
            asked = {
                "max_tokens": 7,
                "temperature": 0.5,
                "top_p": 0.9,
                "n": 2,
                "request_id": "mine",
            }
            await client.post("/v1/completions", json={"prompt": ["abc", "de"], **asked})
        spans = {s.attributes["gen_ai.request.id"]: s for s in exporter.get_finished_spans()}
        first, second = spans["cmpl-mine-0"], spans["cmpl-mine-1"]
        assert (first.name, first.kind, first.parent) == ("llm_request", SpanKind.SERVER, None)
        assert first.resource.attributes["service.name"] == "llmjax"
        assert first.status.status_code is StatusCode.UNSET
        assert before <= first.start_time <= first.end_time <= time.time_ns()
        told = dict(first.attributes)
        assert 0 < told.pop("gen_ai.latency.time_to_first_token") <= told["gen_ai.latency.e2e"]
        assert told.pop("gen_ai.latency.e2e") <= (first.end_time - first.start_time) / 1e9 + 1e-3
        assert told == {
            "gen_ai.request.id": "cmpl-mine-0",
            "gen_ai.response.model": MODEL,
            "gen_ai.request.n": 2,
            "gen_ai.request.max_tokens": 7,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.usage.prompt_tokens": 3,
            "gen_ai.usage.completion_tokens": 10,
            "gen_ai.response.finish_reasons": ("stop", "stop"),
        }
        assert second.attributes["gen_ai.usage.prompt_tokens"] == 2

    test()


def test_it_is_a_part_of_the_trace_that_the_client_names(exporter):
    @run_async
    async def test():
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        async with client_of(EngineDouble(), TRACED) as client:
            for flags in ("01", "00"):
                headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "a=b"}
                for path in ("/v1/chat/completions", "/v1/messages"):
                    answer = await client.post(path, json=body, headers=headers)
                    assert answer.status == 200
                answer = await client.post("/v1/responses", json={"input": "hi"}, headers=headers)
                assert answer.status == 200
            await client.post("/v1/messages", json=body, headers={"traceparent": "nonsense"})
        *parts, own = exporter.get_finished_spans()
        assert len(parts) == 3  # none that the client does not sample
        for span in parts:
            assert f"{span.context.trace_id:x}" == TRACE
            assert f"{span.parent.span_id:016x}" == PARENT and span.parent.is_remote
            assert span.context.trace_state["a"] == "b"
        assert own.parent is None

    test()


def test_failures_are_told(exporter):
    @run_async
    async def test():
        double = EngineDouble(fails=RequestFailedError("a step failed"), fails_at=1)
        async with client_of(double, TRACED) as client:
            assert (await client.post("/v1/completions", json={"prompt": "abc"})).status == 500
            assert (await client.post("/v1/completions", json={"prompt": 5})).status == 400
        (span,) = exporter.get_finished_spans()
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "a step failed"
        told = dict(span.attributes)
        assert told["error.type"] == "RequestFailedError"
        assert told["gen_ai.usage.completion_tokens"] == 3
        assert told["gen_ai.response.finish_reasons"] == ()

    test()


def test_a_client_that_leaves_ends_its_span(exporter):
    @run_async
    async def test():
        double = EngineDouble(gate=asyncio.Event())
        async with client_of(double, TRACED) as client:
            asked = {"prompt": "abc", "stream": True}
            answer = await client.post("/v1/completions", json=asked)
            await answer.content.readline()
            answer.close()
            await until(lambda: not double.running)
        (told,) = spans_of(exporter)
        assert told["gen_ai.usage.completion_tokens"] == 3

    test()


def test_an_engine_says_how_long_it_waited(exporter, tiny_model):
    engine = make_engine(tiny_model)

    @run_async
    async def test():
        engine.start()
        async with client_of(engine, TRACED) as client:
            asked = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
            assert (await client.post("/v1/completions", json=asked)).status == 200
        (told,) = spans_of(exporter)
        assert told.keys() > LATENCIES
        queue, prefill, decode, inference, first, whole = (
            told[f"gen_ai.latency.{name}"]
            for name in (
                *("time_in_queue", "time_in_model_prefill", "time_in_model_decode"),
                *("time_in_model_inference", "time_to_first_token", "e2e"),
            )
        )
        # All tokens may have come at once to who tells of them.
        assert min(queue, prefill) > 0 <= decode
        assert queue + prefill == pytest.approx(first)
        assert prefill + decode == pytest.approx(inference)
        assert queue + inference < whole

    test()
    engine.close()


def test_what_is_embedded_has_a_span_too(exporter, monkeypatch):
    engine = engine_of("bert")

    @run_async
    async def test():
        async with served(engine, TRACED) as client:
            await client.post("/v1/embeddings", json={"input": ["one", "another"]})
        (told,) = spans_of(exporter)
        assert told["gen_ai.usage.prompt_tokens"] > 4 and told["gen_ai.latency.e2e"] > 0

    test()
    engine.close()


def test_spans_reach_a_collector(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    came = []

    async def collect(request):
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        came.append(ExportTraceServiceRequest.FromString(body))
        return web.Response()

    @run_async
    async def test():
        app = web.Application()
        app.router.add_post("/v1/traces", collect)
        async with TestServer(app) as collector:
            config = ServerConfig(otlp_traces_endpoint=str(collector.make_url("/v1/traces")))
            async with client_of(EngineDouble(), config) as client:
                await client.post("/v1/completions", json={"prompt": "abc"})
        (told,) = came
        (resource,) = told.resource_spans
        names = {a.key: a.value.string_value for a in resource.resource.attributes}
        assert names["service.name"] == "mine"
        assert [span.name for span in resource.scope_spans[0].spans] == ["llm_request"]

    test()


def test_what_is_missing_or_wrong_is_said_at_the_start(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke")
    with pytest.raises(ConfigError, match="'smoke', allowed: grpc, http/protobuf"):
        tracing.make_spans(TRACED, MODEL)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'llmjax\[otel\]'"):
        tracing.make_spans(TRACED, MODEL)
    assert tracing.make_spans(ServerConfig(), MODEL) is None
