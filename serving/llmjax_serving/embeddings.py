"""POST /v1/embeddings, /pooling, /score and /rerank: models that pool."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from aiohttp import web

from llmjax.pooled import best_first, pair_up

from .accounts import meter_of
from .body import read_json
from .formatter import JsonObject, new_id
from .schema.pooling import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    parse_embedding,
    parse_pooling,
    parse_rerank,
    parse_score,
)
from .schema.sampling import Limits, check_model
from .state import STATE, ServerState
from .tracing import trace_of

if TYPE_CHECKING:
    from llmjax.engine.pooling_inputs import InputMaker, Plan

R = TypeVar("R", EmbeddingRequest, PoolingRequest, ScoreRequest, RerankRequest)


async def create_embedding(request: web.Request) -> web.Response:
    return await respond(request, parse_embedding, embedding_plan, embedding_body)


async def create_pooling(request: web.Request) -> web.Response:
    return await respond(request, parse_pooling, pooling_plan, pooling_body)


async def create_score(request: web.Request) -> web.Response:
    return await respond(request, parse_score, score_plan, score_body)


async def create_rerank(request: web.Request) -> web.Response:
    return await respond(request, parse_rerank, rerank_plan, rerank_body)


async def respond(
    request: web.Request,
    parse: Callable[[dict[str, Any], Limits], R],
    make_plan: Callable[[InputMaker, R], Plan],
    make_body: Callable[[R, Sequence[Any]], JsonObject],
) -> web.Response:
    """The way that all of them go: read, tokenise, compute, answer."""
    state, arrival = request.app[STATE], time.monotonic()
    engine = state.pooling_engine()
    body = parse(read_json(request), state.limits)
    check_model(body.model, state.model_name)
    plan = await state.in_thread(make_plan, engine.inputs, body)
    vectors = await engine.run(plan.inputs)
    meter_of(request).charge(plan.num_tokens, 0, 0)
    trace_of(request).pooled(plan.num_tokens, arrival)
    text = await state.in_thread(partial(answer, state, plan, vectors, make_body, body))
    return web.json_response(text=text)


def answer(
    state: ServerState,
    plan: Plan,
    vectors: Sequence[np.ndarray],
    make_body: Callable[[R, Sequence[Any]], JsonObject],
    body: R,
) -> str:
    """The answer as JSON; of many vectors it takes a while."""
    whole = {
        **make_body(body, plan.finish(vectors)),
        "created": int(time.time()),
        "model": state.model_name,
        "usage": {"prompt_tokens": plan.num_tokens, "total_tokens": plan.num_tokens},
    }
    return json.dumps(whole)


def embedding_plan(inputs: InputMaker, body: EmbeddingRequest) -> Plan:
    return inputs.embeddings(
        body.inputs,
        truncate=body.truncate,
        add_special_tokens=body.add_special_tokens,
        prompt_name=body.prompt_name,
        dimensions=body.dimensions,
    )


def written(body: EmbeddingRequest, numbers: np.ndarray) -> str | list[Any]:
    """Numbers as a request wants them."""
    if body.base64:
        return base64.b64encode(numbers.astype("<f4").tobytes()).decode()
    return numbers.tolist()


def embedding_body(body: EmbeddingRequest, vectors: Sequence[np.ndarray]) -> JsonObject:
    data = [
        {"object": "embedding", "index": i, "embedding": written(body, vector)}
        for i, vector in enumerate(vectors)
    ]
    return {"id": new_id("embd"), "object": "list", "data": data}


def pooling_plan(inputs: InputMaker, body: PoolingRequest) -> Plan:
    texts = body.texts
    return inputs.of_task(
        body.task,
        texts.inputs,
        truncate=texts.truncate,
        add_special_tokens=texts.add_special_tokens,
        prompt_name=texts.prompt_name,
        dimensions=texts.dimensions,
    )


def pooling_body(body: PoolingRequest, answers: Sequence[Any]) -> JsonObject:
    data = [
        {"object": "pooling", "index": i, "data": written(body.texts, np.asarray(each, np.float32))}
        for i, each in enumerate(answers)
    ]
    return {"id": new_id("pool"), "object": "list", "data": data}


def score_plan(inputs: InputMaker, body: ScoreRequest) -> Plan:
    return inputs.scores(pair_up(body.text_1, body.text_2), truncate=body.truncate)


def score_body(body: ScoreRequest, scores: Sequence[float]) -> JsonObject:
    data = [{"object": "score", "index": i, "score": score} for i, score in enumerate(scores)]
    return {"id": new_id("score"), "object": "list", "data": data}


def rerank_plan(inputs: InputMaker, body: RerankRequest) -> Plan:
    return inputs.scores(
        [(body.query, document) for document in body.documents],
        params=("query", "documents"),
        truncate=body.truncate,
        is_search=True,
    )


def rerank_body(body: RerankRequest, scores: Sequence[float]) -> JsonObject:
    def result(i: int) -> JsonObject:
        document = {"document": {"text": body.documents[i]}} if body.return_documents else {}
        return {"index": i, "relevance_score": scores[i], **document}

    results = [result(i) for i in best_first(scores)[: body.top_n]]
    return {"id": new_id("rerank"), "results": results}
