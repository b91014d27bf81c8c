"""Routes, refusals, keys, metrics: what holds for every endpoint."""

from __future__ import annotations

import asyncio

import pytest

from llmjax import __version__
from llmjax.config import EngineConfig
from llmjax.errors import (
    EngineDeadError,
    QueueFullError,
    QueueTimeoutError,
    RequestTimeoutError,
    ShutdownError,
)
from llmjax_serving.config import ServerConfig

from .double import EOS, MODEL, ByteTokenizer, EngineDouble, client_of, run_async

POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
GETS = ["/v1/models", f"/v1/models/{MODEL}", "/version", "/metrics", "/nowhere"]
PROMPT = {"prompt": "abc"}


async def error_of(response) -> dict:
    body = await response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("url", POSTS)
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\xfa", "not UTF-8"),
        (b'{"temperature": NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "the body is nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "an integer of too many digits, allowed: up to 4300"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
        (b"[]", "the body is []"),
        (b'"a"', 'the body is "a"'),
        (b"null", "the body is null"),
    ],
)
@run_async
async def test_bodies_that_are_not_json_objects(url, raw, message):
    async with client_of(EngineDouble()) as client:
        response = await client.post(url, data=raw, headers={"Content-Type": "application/json"})
        assert response.status == 400
        error = await error_of(response)
        assert message in error["message"]
        assert error["param"] is None
        assert not any(word in error["message"] for word in ("recursion", "codec", "sys."))


@pytest.mark.parametrize("url", POSTS)
@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (b'{"model": "a", "seed": 1, "seed": 2}', "seed"),
        (b'{"messages": [{"role": "user", "role": "system"}]}', "role"),
        (b'{"' + b"x" * 500 + b'": 1, "' + b"x" * 500 + b'": 1}', "x" * 77 + "..."),
    ],
)
@run_async
async def test_a_key_that_comes_twice_is_named(url, raw, key):
    async with client_of(EngineDouble()) as client:
        response = await client.post(url, data=raw, headers={"Content-Type": "application/json"})
        assert response.status == 400
        error = await error_of(response)
        assert error["param"] == key
        assert "twice" in error["message"] and len(error["message"]) < 150


@pytest.mark.parametrize(
    "body",
    [
        {"x" * 100_000: 1},
        {"prompt": "a", "model": "x" * 100_000},
        {"prompt": "a", "user": ["x" * 100_000]},
        {"prompt": "a", "top_k": list(range(100_000))},
        {"prompt": "a", "seed": 10**4000},
    ],
)
@run_async
async def test_what_a_client_sent_is_quoted_only_in_part(body):
    async with client_of(EngineDouble()) as client:
        response = await client.post("/v1/completions", json=body)
        error = await error_of(response)
        assert response.status in (400, 404)
        assert len(error["message"]) < 250
        assert len(error["param"]) <= 80


@pytest.mark.parametrize("field", ["prompt", "stop", "logit_bias", "metadata", "response_format"])
@run_async
async def test_a_value_nested_deeply_is_a_bad_request(field):
    nested = b"[" * 900 + b"]" * 900
    raw = b'{"model": "double", "%b": %b}' % (field.encode(), nested)
    async with client_of(EngineDouble()) as client:
        headers = {"Content-Type": "application/json"}
        response = await client.post("/v1/completions", data=raw, headers=headers)
        assert response.status == 400
        await error_of(response)


@pytest.mark.parametrize("url", POSTS)
@run_async
async def test_other_content_types(url):
    async with client_of(EngineDouble()) as client:
        response = await client.post(url, data={"prompt": "a"})
        assert response.status == 415
        assert "allowed: application/json" in (await error_of(response))["message"]


@pytest.mark.parametrize("url", POSTS)
@run_async
async def test_bodies_that_are_too_large(url):
    async with client_of(EngineDouble(), ServerConfig(max_body_bytes=1000)) as client:
        response = await client.post(url, json={"prompt": "a" * 1000})
        assert response.status == 413
        assert (await error_of(response))["code"] == "request_too_large"


@pytest.mark.parametrize("url", POSTS)
@run_async
async def test_wrong_methods_and_unknown_routes(url):
    async with client_of(EngineDouble()) as client:
        wrong = await client.get(url)
        assert wrong.status == 405
        assert wrong.headers["Allow"] == "POST"
        await error_of(wrong)
        unknown = await client.post(url + "/nowhere", json={})
        assert unknown.status == 404
        await error_of(unknown)


@pytest.mark.parametrize("url", POSTS)
@run_async
async def test_other_models_do_not_exist(url):
    required = {
        "/v1/completions": PROMPT,
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/tokenize": PROMPT,
        "/detokenize": {"tokens": [1]},
    }
    async with client_of(EngineDouble()) as client:
        response = await client.post(url, json={"model": "gpt-5", **required[url]})
        assert response.status == 404
        error = await error_of(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert (await client.post(url, json={"model": MODEL, **required[url]})).status == 200


@run_async
async def test_models():
    async with client_of(EngineDouble()) as client:
        listed = await (await client.get("/v1/models")).json()
        (card,) = listed["data"]
        assert listed["object"] == "list"
        assert card.pop("created") > 0
        assert card == {
            "id": MODEL,
            "object": "model",
            "owned_by": "llmjax",
            "root": "some/path",
            "parent": None,
            "max_model_len": 1000,
        }
        assert (await client.get(f"/v1/models/{MODEL}")).status == 200
        missing = await client.get("/v1/models/some/other")
        assert missing.status == 404
        assert (await error_of(missing))["code"] == "model_not_found"


@run_async
async def test_tokenize_and_back():
    engine = EngineDouble(tokenizer=ByteTokenizer(adds_bos=True))
    async with client_of(engine) as client:
        response = await client.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})
        assert await response.json() == {
            "count": 3,
            "max_model_len": 1000,
            "tokens": [256, 97, 98],
            "token_strs": ["<s>", "a", "b"],
        }
        bare = await client.post("/tokenize", json={"prompt": "ab", "add_special_tokens": False})
        assert (await bare.json())["tokens"] == [97, 98]
        messages = [{"role": "user", "content": "a"}]
        chat = await (await client.post("/tokenize", json={"messages": messages})).json()
        assert bytes(chat["tokens"][1:]).decode() == "<user>a<assistant>"
        assert chat["token_strs"] is None
        back = await client.post("/detokenize", json={"tokens": [97, EOS]})
        assert await back.json() == {"prompt": "a</s>"}
        empty = await client.post("/detokenize", json={"tokens": []})
        assert await empty.json() == {"prompt": ""}
        bad = await client.post("/detokenize", json={"tokens": [258]})
        assert bad.status == 400
        assert (await error_of(bad))["param"] == "tokens"
        about = await (await client.get("/tokenizer_info")).json()
        assert about == {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "chat_template": "yes",
            "model_max_length": 1000,
            "vocab_size": 258,
        }


@run_async
async def test_preflight_needs_no_key():
    config = ServerConfig(api_key=("s3cret",), allowed_origins=("https://a.example",))
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with client_of(EngineDouble(), config) as client:
        headers = {"Origin": "https://a.example", **asks}
        yes = await client.options("/v1/chat/completions", headers=headers)
        assert yes.status == 204
        assert yes.headers["Access-Control-Allow-Origin"] == "https://a.example"
        assert yes.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        no = await client.options("/v1/chat/completions", headers={"Origin": "https://b", **asks})
        assert "Access-Control-Allow-Origin" not in no.headers
        refused = await client.post("/v1/chat/completions", headers={"Origin": "https://a.example"})
        assert refused.status == 401
        assert refused.headers["Access-Control-Allow-Origin"] == "https://a.example"


@run_async
async def test_any_origin_may_call_by_default():
    async with client_of(EngineDouble()) as client:
        body = {**PROMPT, "stream": True}
        response = await client.post("/v1/completions", json=body, headers={"Origin": "https://a"})
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert "Access-Control-Allow-Origin" not in (await client.get("/health")).headers


@run_async
async def test_a_loading_server_says_so():
    async with client_of(None) as client:
        for response in (
            await client.get("/health"),
            await client.get("/v1/models"),
            await client.get("/metrics"),
            await client.post("/v1/completions", json=PROMPT),
        ):
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            error = await error_of(response)
            assert (error["code"], error["type"]) == ("loading", "server_error")
        assert (await client.get("/version")).status == 200


@run_async
async def test_health_and_version():
    engine = EngineDouble()
    async with client_of(engine) as client:
        assert (await client.get("/health")).status == 200
        assert await (await client.get("/version")).json() == {"version": __version__}
        engine.dead = "the engine has made no progress for 300 s"
        response = await client.get("/health")
        assert response.status == 503
        error = await error_of(response)
        assert error["code"] == "engine_dead"
        assert error["message"] == "the engine has made no progress for 300 s"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
@run_async
async def test_a_full_queue_is_429(prompt, stream):
    engine = EngineDouble(fails=QueueFullError("4096 requests wait", retry_after=7))
    async with client_of(engine) as client:
        response = await client.post("/v1/completions", json={"prompt": prompt, "stream": stream})
        assert response.status == 429
        assert response.headers["Retry-After"] == "7"
        error = await error_of(response)
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert not engine.running
        metrics = await (await client.get("/metrics")).text()
        assert 'finished_reason="abort"' not in metrics, "what is refused has not begun"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (QueueTimeoutError("waited 9.0 s", retry_after=9), 503, "queue_timeout", "9"),
        (RequestTimeoutError("had not ended"), 504, "timeout", None),
    ],
)
@run_async
async def test_what_is_late_is_told_so(error, status, code, retry, stream):
    async with client_of(EngineDouble(fails=error)) as client:
        body = {"prompt": "a", "stream": stream, "timeout": 2, "user": "me"}
        response = await client.post("/v1/completions", json=body)
        assert response.status == status
        assert response.headers.get("Retry-After") == retry
        told = await error_of(response)
        assert (told["code"], told["type"], told["message"]) == (code, "server_error", str(error))


@run_async
async def test_a_beam_search_is_late_as_a_whole():
    """Its steps are requests of their own, none of which is late."""
    asked = {"prompt": "a", "use_beam_search": True, "max_tokens": 3, "queue_timeout": 9}
    engine = EngineDouble(says=["a"])
    async with client_of(engine) as client:
        assert (await client.post("/v1/completions", json=asked | {"timeout": 60})).status == 200
        waits = [options.queue_timeout for options in engine.options]
        assert waits == [9] + [None] * (len(waits) - 1) and len(waits) > 1
        engine.says, engine.gate = ["", "a"], asyncio.Event()
        response = await client.post("/v1/completions", json=asked | {"timeout": 0.05})
        assert (response.status, (await error_of(response))["code"]) == (504, "timeout")
        assert not engine.running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDeadError("the engine has stopped: out of memory"), "engine_dead"),
        (ShutdownError("the engine is shutting down"), "shutting_down"),
    ],
)
@run_async
async def test_an_engine_that_serves_no_more_is_503(error, code, stream):
    async with client_of(EngineDouble(fails=error)) as client:
        response = await client.post("/v1/completions", json={**PROMPT, "stream": stream})
        assert response.status == 503
        told = await error_of(response)
        assert (told["code"], told["message"]) == (code, str(error))


@run_async
async def test_what_nobody_foresaw_is_500_without_its_inside(caplog):
    engine = EngineDouble(fails=KeyError("secret"))
    async with client_of(engine) as client:
        response = await client.post("/v1/completions", json=PROMPT)
        assert response.status == 500
        error = await error_of(response)
        assert error["type"] == "server_error"
        assert "secret" not in error["message"]
        assert "secret" in caplog.text
        engine.fails = None
        assert (await client.post("/v1/completions", json=PROMPT)).status == 200


@run_async
async def test_metrics():
    engine = EngineDouble()
    async with client_of(engine) as client:
        await client.post("/v1/completions", json={"prompt": "abc", "n": 2})
        response = await client.get("/metrics")
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        text = await response.text()
    label = f'{{engine="0",model_name="{MODEL}"}}'
    stopped = label.replace(",", ',finished_reason="stop",')
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    expected = {
        f"llmjax:num_requests_running{label}": 0,
        f"llmjax:num_requests_waiting{label}": 0,
        f"llmjax:kv_cache_usage_perc{label}": 0.25,
        f"llmjax:kv_cache_pages_cached{label}": 1,
        f"llmjax:prefix_cache_queries_total{label}": 9,
        f"llmjax:prefix_cache_hits_total{label}": 4,
        f"llmjax:pages_saved_total{label}": 2,
        f"llmjax:pages_loaded_total{label}": 1,
        f"llmjax:kv_offload_store_bytes_total{label}": 2048,
        f"llmjax:kv_offload_load_bytes_total{label}": 1024,
        f"llmjax:host_pages{label}": 8,
        f"llmjax:host_pages_used{label}": 1,
        f"llmjax:step_bucket_tokens_total{label}": 70,
        f"llmjax:step_padded_tokens_total{label}": 7,
        f"llmjax:step_prefill_tokens_total{label}": 0,
        f"llmjax:step_decode_tokens_total{label}": 0,
        f"llmjax:compiled_programs_total{label}": 0,
        f"llmjax:compile_seconds_total{label}": 0,
        f"llmjax:request_prefill_time_seconds_count{label}": 0,
        f"llmjax:request_decode_time_seconds_count{label}": 1,
        f"llmjax:num_preemptions_total{label}": 5,
        f"llmjax:prompt_tokens_total{label}": 3,
        f"llmjax:generation_tokens_total{label}": 10,
        f"llmjax:request_success_total{stopped}": 2,
        f"llmjax:time_to_first_token_seconds_count{label}": 1,
        f"llmjax:inter_token_latency_seconds_count{label}": 1,
        f"llmjax:request_time_per_output_token_seconds_count{label}": 1,
        f"llmjax:e2e_request_latency_seconds_count{label}": 1,
        f"llmjax:request_queue_time_seconds_count{label}": 0,
        f"llmjax:iteration_tokens_total_count{label}": 0,
        f"llmjax:request_prompt_tokens_sum{label}": 3,
        f"llmjax:request_generation_tokens_sum{label}": 10,
    }
    assert {name: float(lines[name]) for name in expected} == expected
    assert "process_resident_memory_bytes" in lines


@pytest.mark.parametrize(
    ("url", "method", "result"),
    [
        ("/v1/completions", "encode", [97]),
        ("/tokenize", "encode", [97]),
        ("/tokenize", "token_text", "a"),
    ],
)
@run_async
async def test_tokenising_does_not_hold_up_the_loop(url, method, result):
    engine = EngineDouble()
    in_thread, let_go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(*args):
        loop.call_soon_threadsafe(in_thread.set)
        asyncio.run_coroutine_threadsafe(let_go.wait(), loop).result(10)
        return result

    async with client_of(engine) as client:
        setattr(engine.tokenizer, method, slow)
        body = {"prompt": "a" * 5000} | ({"return_token_strs": True} if url == "/tokenize" else {})
        answer = asyncio.ensure_future(client.post(url, json=body))
        await in_thread.wait()
        assert (await client.get("/health")).status == 200
        let_go.set()
        assert (await answer).status == 200


@run_async
async def test_ready_is_whether_a_request_would_be_taken():
    engine = EngineDouble(config=EngineConfig.of("some/path", max_queue_len=3))
    async with client_of(engine) as client:

        async def refusal():
            response = await client.get("/ready")
            assert response.status == 503
            return (await error_of(response))["code"]

        assert (await client.get("/ready")).status == 200
        engine.queued = 3
        assert await refusal() == "queue_full"
        assert (await client.get("/health")).status == (await client.get("/ping")).status == 200
        engine.queued = 2
        engine.dead = "it fell off"
        assert await refusal() == "engine_dead"
        assert (await client.get("/ping")).status == 503
        engine.dead = None
        client.state.draining = True
        assert await refusal() == "shutting_down"
    async with client_of(None) as client:
        response = await client.get("/ready")
        assert (await error_of(response))["code"] == "loading"


@run_async
async def test_load():
    engine = EngineDouble(gate=asyncio.Event(), queued=4)
    async with client_of(engine) as client:
        stream = await client.post("/v1/completions", json={**PROMPT, "stream": True})
        assert await (await client.get("/load")).json() == {
            "server_load": 1,
            "requests_running": 1,
            "requests_waiting": 0,
            "requests_queued": 4,
            "max_queue_len": engine.config.scheduler.max_queue_len,
            "pages_used": 1,
            "pages_cached": 1,
            "pages_free": 2,
        }
        engine.gate.set()
        await stream.text()
        assert (await (await client.get("/load")).json())["server_load"] == 0
