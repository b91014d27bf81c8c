"""What /metrics and the log say of a real engine, and under which names."""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from llmjax.config import EngineConfig
from llmjax.engine.async_engine import AsyncEngine
from llmjax.errors import ConfigError
from llmjax_serving.config import ServerConfig
from llmjax_serving.stats_log import StatsLog, logged_stats

from .double import EngineDouble, client_of, run_async, until

VLLM = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("iteration_tokens_total", "request_prompt_tokens", "request_generation_tokens"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "kv_offload_load_bytes_total"),
    *("kv_offload_store_bytes_total", "cache_config_info"),
}
"""Families that vLLM (v1) has under the same names."""


def samples(text):
    """The value of each sample, by name and labels."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def scrape(client):
    return await (await client.get("/metrics")).text()


def make_engine(model, **options):
    sizes = {
        "served_model_name": "tiny",
        "max_model_len": 96,
        "block_size": 4,
        "max_num_seqs": 8,
        "token_buckets": (16, 48),
        "seq_buckets": (8,),
        "num_gpu_blocks_override": 30,
        "prefill_chunk_size": 16,
        "background": False,
    }
    return AsyncEngine(EngineConfig.of(str(model), **{**sizes, **options}))


@run_async
async def test_every_name_that_vllm_has_is_the_same():
    async with client_of(EngineDouble()) as client:
        families = set(re.findall(r"^# TYPE llmjax:(\w+) ", await scrape(client), re.M))
    assert families >= VLLM


@run_async
async def test_the_alias_tells_the_same_again():
    engine = EngineDouble()
    async with client_of(engine, ServerConfig(metrics_alias="vllm")) as client:
        client.state.model_name = "llmjax:x"
        await client.post("/v1/completions", json={"prompt": "abc"})
        text = await scrape(client)
    told = samples(text)
    ours = {name: value for name, value in told.items() if name.startswith("llmjax:")}
    theirs = {name: value for name, value in told.items() if name.startswith("vllm:")}
    assert theirs == {name.replace("llmjax:", "vllm:", 1): value for name, value in ours.items()}
    assert len(told) == len({*told}) and "process_resident_memory_bytes" in told
    assert 'vllm:num_requests_running{engine="0",model_name="llmjax:x"}' in theirs
    for kind in ("HELP", "TYPE"):
        assert text.count(f"# {kind} vllm:") == text.count(f"# {kind} llmjax:") > 20


@run_async
async def test_without_the_alias_there_is_none():
    async with client_of(EngineDouble()) as client:
        assert "vllm:" not in await scrape(client)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"metrics_alias": "tgi"}, "metrics_alias is 'tgi', allowed: vllm, or none"),
        ({"log_stats_interval": -1.0}, "log_stats_interval is -1.0, allowed: 0 to 86400"),
    ],
)
def test_what_is_not_allowed_is_refused(option, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**option)


def test_a_real_engine_counts_what_it_did(tiny_model):
    engine = make_engine(tiny_model, swap_space=0.01, forecast_margin=None)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 250) for _ in range(30)] for _ in range(7)]
    prompts += [prompts[0]] * 2

    async def load():
        engine.start()
        engine.engine.host.costs.compute = 1e3  # whatever is wanted again is moved
        async with client_of(engine) as client:
            client.state.model_name = "tiny"
            log = StatsLog(engine)
            body = {"max_tokens": 20, "ignore_eos": True, "temperature": 0}
            answers = [
                client.post("/v1/completions", json={"prompt": prompt, **body})
                for prompt in prompts
            ]
            for answer in await asyncio.gather(*answers):
                assert answer.status == 200
            await until(lambda: not engine.engine.has_work)
            return samples(await scrape(client)), log.line(), log.line()

    try:
        told, line, silent = asyncio.run(load())
    finally:
        engine.close()
    value = lambda name: told[f'llmjax:{name}{{engine="0",model_name="tiny"}}']  # noqa: E731
    stats = engine.stats()
    assert value("prompt_tokens_total") == 9 * 30
    assert value("generation_tokens_total") == 9 * 20
    assert value("prefix_cache_queries_total") == 9 * 30
    assert 0 < value("prefix_cache_hits_total") == stats.prefix_hits <= 2 * 29
    assert value("num_preemptions_total") == stats.num_preemptions > 0
    computed = value("step_prefill_tokens_total") + value("step_decode_tokens_total")
    assert value("step_bucket_tokens_total") - value("step_padded_tokens_total") == computed
    assert value("iteration_tokens_total_sum") == computed
    # What was preempted comes back as part of a prompt.
    assert 0 < value("step_decode_tokens_total") <= 9 * 19 + 9
    assert value("step_prefill_tokens_total") >= 9 * 30 - value("prefix_cache_hits_total")
    assert value("pages_saved_total") > 0 < value("pages_loaded_total")
    size = stats.page_bytes
    assert value("kv_offload_store_bytes_total") == size * value("pages_saved_total")
    assert value("kv_offload_load_bytes_total") == size * value("pages_loaded_total")
    assert value("kv_cache_pages_used") == 0
    assert value("kv_cache_pages_cached") + value("kv_cache_pages_free") == 30
    assert value("host_pages") == int(0.01 * 2**30 / size) > value("host_pages_used")
    assert value("compiled_programs_total") == len(engine.engine.buckets.all)
    assert value("compile_seconds_total") > 0
    for name in ("queue", "prefill", "decode"):
        assert value(f"request_{name}_time_seconds_count") == 9
    assert value("time_to_first_token_seconds_count") == 9
    (info,) = [name for name in told if name.startswith("llmjax:cache_config_info{")]
    assert 'block_size="4"' in info and 'num_gpu_blocks="30"' in info
    words = re.match(
        r"Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, "
        r"Running: 0 reqs, Waiting: 0 reqs, KV cache usage: 0.0%, "
        r"Prefix cache hit rate: ([\d.]+)%, Preemptions: (\d+), "
        r"Swapped: (\d+) pages out, (\d+) in, Padding: ([\d.]+)%$",
        line,
    )
    prompt, generation, hit_rate, preemptions, saved, loaded, padding = map(float, words.groups())
    assert prompt / generation == pytest.approx(270 / 180, rel=0.02)
    assert hit_rate == pytest.approx(100 * stats.prefix_hits / 270, abs=0.06)
    assert (preemptions, saved, loaded) == (
        stats.num_preemptions,
        stats.pages_saved,
        stats.pages_loaded,
    )
    assert padding == pytest.approx(100 * stats.padded_tokens / stats.bucket_tokens, abs=0.06)
    assert silent is None, "nothing has happened since"


@run_async
async def test_a_line_comes_while_there_is_work_and_never_at_0(caplog):
    caplog.set_level("INFO", "llmjax_serving.stats_log")
    engine = EngineDouble(gate=asyncio.Event())
    async with client_of(engine) as client, logged_stats(engine, 0.02):
        await asyncio.sleep(0.1)
        assert not caplog.messages, "an idle server is silent"
        answer = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "abc"}))
        await until(lambda: len(caplog.messages) >= 3)
        assert "Running: 1 reqs, Waiting: 0 reqs, KV cache usage: 25.0%, " in caplog.text
        engine.gate.set()
        assert (await answer).status == 200
        await until(lambda: engine.num_requests == 0)
        await asyncio.sleep(0.1)
        count = len(caplog.messages)
        await asyncio.sleep(0.1)
        assert len(caplog.messages) == count
    caplog.clear()
    engine.gate.clear()
    async with client_of(engine) as client, logged_stats(engine, 0.0):
        answer = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "abc"}))
        await asyncio.sleep(0.1)
        engine.gate.set()
        await answer
    assert not caplog.messages


@run_async
async def test_throughput_is_that_of_the_interval(monkeypatch):
    engine, now = EngineDouble(), [100.0]
    monkeypatch.setattr("llmjax_serving.stats_log.time.monotonic", lambda: now[0])
    log = StatsLog(engine)
    engine.metrics.prompt_tokens.inc(300)
    engine.metrics.generation_tokens.inc(50)
    now[0] += 10
    assert "prompt throughput: 30.0 tokens/s, Avg generation throughput: 5.0" in log.line()
    engine.metrics.generation_tokens.inc(1)
    now[0] += 10
    line = log.line()
    assert "prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.1 tokens/s" in line
    now[0] += 10
    assert log.line() is None
