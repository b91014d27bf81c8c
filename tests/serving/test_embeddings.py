"""/v1/embeddings, /score and /rerank around tiny models."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shlex
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from aiohttp.test_utils import TestClient, TestServer

from llmjax.config import EngineConfig
from llmjax.engine.pooling import PoolingEngine, make_pooling_engine
from llmjax_serving.app import make_app
from llmjax_serving.config import ServerConfig
from llmjax_serving.openapi import REQUESTS
from llmjax_serving.openapi_answers import ANSWERS
from llmjax_serving.state import ServerState

from .conftest import KEY, PROGRAM, Served
from .double import MODEL, EngineDouble, client_of, run_async, until

FIXTURES = Path(__file__).parents[1] / "pooling" / "fixtures"
TEXTS, QUERY, LONG = json.loads((FIXTURES / "texts.json").read_text(encoding="utf-8")).values()
RERANKS = ("/rerank", "/v1/rerank", "/v2/rerank")


def engine_of(name: str, **options: Any) -> PoolingEngine:
    options = {"token_buckets": (128,), "max_queue_len": 64, **options}
    engine = make_pooling_engine(EngineConfig.of(str(FIXTURES / name), **options))
    assert engine is not None
    engine.start()
    return engine


@pytest.fixture(scope="module")
def embedder() -> Iterator[PoolingEngine]:
    engine = engine_of("bert")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def scorer() -> Iterator[PoolingEngine]:
    engine = engine_of("bert-scorer")
    yield engine
    engine.close()


@asynccontextmanager
async def served(
    engine: PoolingEngine, config: ServerConfig | None = None
) -> AsyncIterator[TestClient]:
    state = ServerState(MODEL, config or ServerConfig(), pooling=engine)
    server = TestServer(make_app(state), handler_cancellation=True)
    async with TestClient(server) as client:
        client.state = state  # type: ignore[attr-defined]
        yield client
    state.close()


async def call(client: TestClient, path: str, **body: Any) -> tuple[int, Any]:
    response = await client.post(path, json=body)
    return response.status, await response.json()


def checked(name: str, answer: Any) -> Any:
    """An answer that is as /openapi.json says."""
    schema = {**ANSWERS[name], "components": {"schemas": ANSWERS}}
    jsonschema.Draft202012Validator(schema).validate(answer)
    return answer


@run_async
async def test_texts_and_ids_one_and_many(embedder):
    ref = np.load(FIXTURES / "bert" / "ref.npz")
    async with served(embedder) as client:
        _, tokens = await call(client, "/tokenize", prompt=TEXTS[0])
        for asked, count in ((TEXTS[0], 1), (TEXTS[:3], 3), (tokens["tokens"], 1)):
            status, answer = await call(client, "/v1/embeddings", input=asked, model=MODEL)
            assert status == 200, answer
            checked("Embeddings", answer)
            assert [item["index"] for item in answer["data"]] == list(range(count))
            got = np.array([item["embedding"] for item in answer["data"]])
            np.testing.assert_allclose(got, ref["texts"][:count], atol=2e-5)
            used = int(ref["lengths"][:count].sum())
            assert answer["usage"] == {"prompt_tokens": used, "total_tokens": used}
        ids = [tokens["tokens"]] * 2
        _, answer = await call(client, "/v1/embeddings", input=ids, encoding_format="base64")
        for item in answer["data"]:
            got = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
            np.testing.assert_allclose(got, ref["texts"][0], atol=2e-5)
        _, bare = await call(client, "/v1/embeddings", input="hello", add_special_tokens=False)
        _, whole = await call(client, "/v1/embeddings", input="hello", user="me")
        counts = [answer["usage"]["prompt_tokens"] for answer in (bare, whole)]
        assert counts[1] - counts[0] == 2
        _, short = await call(client, "/v1/embeddings", input=TEXTS, dimensions=8)
        got = np.array([item["embedding"] for item in short["data"]])
        np.testing.assert_allclose(got, ref["short"], atol=2e-5)
        _, cut = await call(client, "/v1/embeddings", input=LONG, truncate_prompt_tokens=-1)
        np.testing.assert_allclose(cut["data"][0]["embedding"], ref["long"], atol=2e-5)
        assert cut["usage"]["prompt_tokens"] == embedder.max_model_len


@pytest.mark.parametrize(("name", "token"), [("roberta", 0), ("qwen3", -1)])
def test_vectors_of_tokens(name, token):
    """Where one token stands for all, its vector is sentence-transformers' of the text."""
    engine = engine_of(name, token_buckets=(200,))
    ref = np.load(FIXTURES / name / "ref.npz")

    @run_async
    async def test():
        async with served(engine) as client:
            both = (
                call(client, "/pooling", input=TEXTS[:5], task="token_embed"),
                call(client, "/v1/embeddings", input=TEXTS[5:8]),
            )
            (status, answer), (_, whole) = await asyncio.gather(*both)
            assert status == 200, answer
            checked("Pooled", answer)
            counts = [len(item["data"]) for item in answer["data"]]
            assert counts == ref["lengths"][:5].tolist()
            got = [item["data"][token] for item in answer["data"]]
            np.testing.assert_allclose(got, ref["texts"][:5], atol=2e-5)
            got = [item["embedding"] for item in whole["data"]]
            np.testing.assert_allclose(got, ref["texts"][5:8], atol=2e-5)
            _, same = await call(client, "/pooling", input=TEXTS[:5], encoding_format="base64")
            for item, other in zip(same["data"], answer["data"], strict=True):
                flat = np.frombuffer(base64.b64decode(item["data"]), "<f4")
                np.testing.assert_allclose(flat, np.ravel(other["data"]), atol=1e-5)
            _, pooled = await call(client, "/pooling", input=TEXTS[0], task="embed")
            np.testing.assert_allclose(pooled["data"][0]["data"], ref["texts"][0], atol=2e-5)
            status, answer = await call(client, "/pooling", input="a", task="classify")
            assert (status, answer["error"]["code"]) == (400, "unsupported_task")

    test()
    engine.close()


@run_async
async def test_vectors_of_tokens_are_cut_and_have_a_length(embedder):
    async with served(embedder) as client:
        _, whole = await call(client, "/pooling", input=TEXTS[0])
        _, short = await call(client, "/pooling", input=TEXTS[0], dimensions=8)
        _, cut = await call(client, "/pooling", input=TEXTS[0], truncate_prompt_tokens=4)
    whole, short = (np.array(answer["data"][0]["data"]) for answer in (whole, short))
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, atol=1e-5)
    assert short.shape == (len(whole), 8) and len(cut["data"][0]["data"]) == 4
    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(short, expected, atol=1e-5)


@run_async
async def test_a_text_alone_has_a_score(scorer):
    async with served(scorer) as client:
        status, answer = await call(client, "/pooling", input=TEXTS[:2])
        assert status == 200, answer
        checked("Pooled", answer)
        _, again = await call(client, "/pooling", input=TEXTS[1], task="classify")
        scores = [item["data"] for item in answer["data"]]
        assert all(len(score) == 1 and 0 < score[0] < 1 for score in scores)
        assert again["data"][0]["data"] == pytest.approx(scores[1], abs=1e-6)
        for fields, param in (
            ({"task": "token_embed"}, None),
            ({"task": "sort"}, "task"),
            ({"dimensions": 8}, "dimensions"),
            ({"prompt_name": "query"}, "prompt_name"),
        ):
            status, answer = await call(client, "/pooling", input="a", **fields)
            assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@run_async
async def test_scores_of_pairs(scorer, path):
    ref = np.load(FIXTURES / "bert-scorer" / "ref.npz")
    async with served(scorer) as client:
        status, answer = await call(client, path, text_1=QUERY, text_2=TEXTS)
        assert status == 200, answer
        checked("Scores", answer)
        scores = [item["score"] for item in answer["data"]]
        np.testing.assert_allclose(scores, ref["scores"], atol=1e-5)
        assert answer["usage"]["prompt_tokens"] == ref["lengths"].sum()
        _, answer = await call(client, path, text_1=[QUERY] * 2, text_2=TEXTS[:2])
        assert [item["score"] for item in answer["data"]] == pytest.approx(scores[:2], abs=1e-6)


@pytest.mark.parametrize("path", RERANKS)
@run_async
async def test_documents_best_first(scorer, path):
    order = np.argsort(-np.load(FIXTURES / "bert-scorer" / "ref.npz")["scores"]).tolist()
    async with served(scorer) as client:
        documents = [TEXTS[0], *({"text": text} for text in TEXTS[1:])]
        status, answer = await call(client, path, query=QUERY, documents=documents)
        assert status == 200, answer
        checked("Ranking", answer)
        assert [result["index"] for result in answer["results"]] == order
        assert [r["document"]["text"] for r in answer["results"]] == [TEXTS[i] for i in order]
        few = {"top_n": 2, "return_documents": False}
        _, answer = await call(client, path, query=QUERY, documents=documents, **few)
        assert [set(result) for result in answer["results"]] == [{"index", "relevance_score"}] * 2


@run_async
async def test_embeddings_rank_by_similarity(embedder):
    vectors = np.load(FIXTURES / "bert" / "ref.npz")["texts"]
    similar = vectors @ vectors[TEXTS.index(QUERY)]
    async with served(embedder) as client:
        _, answer = await call(client, "/rerank", query=QUERY, documents=TEXTS)
        assert [r["index"] for r in answer["results"]] == np.argsort(-similar).tolist()
        used = np.load(FIXTURES / "bert" / "ref.npz")["lengths"][:-1].sum()
        assert answer["usage"]["prompt_tokens"] == used  # the query is one of them: once


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [""]}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input"),
        ("/v1/embeddings", {"input": [[300]]}, "input"),
        ("/v1/embeddings", {"input": [-1]}, "input"),
        ("/v1/embeddings", {"input": [1.5]}, "input"),
        ("/v1/embeddings", {"input": LONG}, "input"),
        ("/v1/embeddings", {"input": [5] * 101}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 65}, "input"),
        ("/v1/embeddings", {"input": {"text": "a"}}, "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 33}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 101}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name"),
        ("/v1/embeddings", {"input": "a", "user": 1}, "user"),
        ("/v1/embeddings", {"input": "a", "temperature": 1}, "temperature"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_1"),
        ("/score", {"text_1": "a", "text_2": [1]}, "text_2[0]"),
        ("/score", {"text_1": "a", "text_2": LONG}, "text_2"),
        ("/score", {"text_1": "", "text_2": "a"}, "text_1"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": "b"}, "documents"),
        ("/rerank", {"query": "a", "documents": [{}]}, "documents[0].text"),
        ("/rerank", {"query": "a", "documents": [{"text": "b", "id": 1}]}, "documents[0].id"),
        ("/rerank", {"query": "a", "documents": [""]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ],
)
@run_async
async def test_refusals_name_the_field(embedder, path, body, param):
    async with served(embedder) as client:
        status, answer = await call(client, path, **body)
    assert status == 400
    checked("Error", answer)
    assert answer["error"]["param"] == param


@run_async
async def test_what_a_model_cannot_do_is_a_400_that_says_what_it_can(embedder, scorer):
    chat = {"messages": [{"role": "user", "content": "a"}]}
    generation = (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", chat))
    for engine, does in ((embedder, "embeds texts"), (scorer, "scores pairs")):
        async with served(engine) as client:
            for path, body in generation:
                status, answer = await call(client, path, **body)
                assert status == 400
                assert answer["error"]["code"] == "unsupported_task"
                assert f"does not generate text; it {does}" in answer["error"]["message"]
    async with served(scorer) as client:
        status, answer = await call(client, "/v1/embeddings", input="a")
        assert (status, answer["error"]["code"]) == (400, "unsupported_task")
    async with client_of(EngineDouble()) as client:
        for path in ("/v1/embeddings", "/score", *RERANKS):
            status, answer = await call(client, path)
            assert status == 400 and "--pooling" in answer["error"]["message"]


@run_async
async def test_an_unknown_model_is_a_404(embedder):
    async with served(embedder) as client:
        status, answer = await call(client, "/v1/embeddings", input="a", model="other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@run_async
async def test_a_full_queue_is_a_429_and_who_leaves_makes_room(monkeypatch):
    engine = engine_of("bert", max_queue_len=2)
    begin, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    pack = engine._pack

    def slow(*args):
        loop.call_soon_threadsafe(begin.set)
        assert go_on.wait(20)
        return pack(*args)

    monkeypatch.setattr(engine, "_pack", slow)
    async with served(engine) as client:
        first = asyncio.ensure_future(call(client, "/v1/embeddings", input="one"))
        await begin.wait()
        second = asyncio.ensure_future(call(client, "/v1/embeddings", input=["two", "three"]))
        await until(lambda: engine.num_waiting == 2)
        status, answer = await call(client, "/v1/embeddings", input="four")
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        second.cancel()
        go_on.set()
        assert (await first)[0] == 200
        assert (await call(client, "/v1/embeddings", input="five"))[0] == 200
    engine.close()


@run_async
async def test_it_is_healthy_and_counted(embedder):
    async with served(embedder) as client:
        await call(client, "/v1/embeddings", input="hello there")
        text = await (await client.get("/metrics")).text()
        for name in ("prompt_tokens_total", "num_requests_waiting", "step_padded_tokens"):
            assert re.search(rf'^llmjax:{name}{{.*model_name="', text, re.M)
        assert (await client.get("/health")).status == 200
        card = await (await client.get("/v1/models")).json()
        assert card["data"][0]["max_model_len"] == embedder.max_model_len
        assert (await client.get("/dashboard/state")).status == 400
        client.state.draining = True
        assert (await call(client, "/v1/embeddings", input="a"))[0] == 503


def test_requests_are_described():
    body = {"input": ["a", [1, 2]], "encoding_format": "base64"}
    for name, right in (
        ("EmbeddingRequest", body),
        ("ScoreRequest", {"text_1": "a", "text_2": ["b"]}),
        ("RerankRequest", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ):
        checker = jsonschema.Draft202012Validator(REQUESTS[name])
        assert checker.is_valid(right)
        assert not checker.is_valid(right | {"unknown": 1})
        assert not checker.is_valid(dict(list(right.items())[1:]))


def test_the_program_serves_openai_s_client(environment):
    command = [*PROGRAM, "serve", str(FIXTURES / "bert"), "--token-buckets", "128"]
    command += ["--port", "0", "--log-level", "warning", "--served-model-name", "tiny"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        server = Served(process)
        assert any("embeddings, pooling mean" in line for line in server.banner)
        curl = shlex.split(server.banner[-1])
        sent = json.loads(curl[curl.index("-d") + 1])
        assert (
            curl[1] == f"{server.url}/v1/embeddings"
            and server.call("/v1/embeddings", sent)[0] == 200
        )
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        answer = client.embeddings.create(model="tiny", input=TEXTS)  # base64 on the wire
        got = np.array([item.embedding for item in answer.data])
        ref = np.load(FIXTURES / "bert" / "ref.npz")
        np.testing.assert_allclose(got, ref["texts"], atol=2e-5)
        assert answer.usage.prompt_tokens == ref["lengths"][:-1].sum()
        with pytest.raises(openai.BadRequestError, match="does not generate text"):
            client.completions.create(model="tiny", prompt="a")
        assert server.stop() == 0
    finally:
        process.kill()
        process.communicate()
