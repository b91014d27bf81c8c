"""/v1/responses: OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from llmjax.answers import AnswerPlan
from llmjax.config import ModelConfig
from llmjax.errors import InvalidRequestError
from llmjax.output import RequestOutput

from . import paging
from .accounts import meter_of
from .body import read_json
from .chat import make_job
from .generation import Job, Outputs, run
from .owner import owner_of
from .paging import page, query
from .prompts import encode_chat
from .response_events import ResponseFormatter
from .response_store import ResponseStore, StoredResponse
from .schema.chat import ChatRequest
from .schema.fields import Field, Parse, only, refuse
from .schema.response_items import Item, check_calls, new_item_id, resolved
from .schema.responses import (
    LOGPROBS,
    ResponseRequest,
    chat_request,
    naming_fields,
    parse_response,
)
from .schema.sampling import check_model
from .sse import respond
from .state import STATE
from .tracing import trace_of

if TYPE_CHECKING:
    from llmjax.tokenizer import Tokenizer

LAST_WORDS_SECONDS = 5.0
"""What a response that is cancelled gets to end."""
STORE = web.AppKey("responses", ResponseStore)


def conversation_of(request: ResponseRequest, store: ResponseStore, owner: str) -> list[Item]:
    """What was said in earlier responses, and what is new.

    Raises:
        InvalidRequestError: something that it refers to is not there.
    """
    history: list[Item] = []
    if request.previous is not None:
        previous = store.find(request.previous, owner)
        if previous is None or previous.is_running:
            what = "is not stored" if previous is None else "has not ended"
            raise InvalidRequestError(
                f"previous_response_id: the response {request.previous[:80]!r} {what}",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        history = previous.conversation()
    given = request.items
    if any(item["type"] == "item_reference" for item in given):
        given = resolved(given, store.items(owner))
    check_calls(history, given)
    return history + given


def with_fewer_turns(tokenizer: Tokenizer, chat: ChatRequest, max_model_len: int) -> ChatRequest:
    """`chat` without as many turns of its beginning as it takes to fit; the last one stays.

    A turn goes from what a user says to what the next one says. System messages at the beginning
    stay.
    """
    said = chat.prompt.messages
    first = next((i for i, message in enumerate(said) if message["role"] != "system"), len(said))
    users = [i for i in range(first + 1, len(said)) if said[i]["role"] == "user"]
    starts = [first, *users]
    room = max_model_len - (chat.params.max_tokens or 1)

    def begun_at(start: int) -> ChatRequest:
        return replace(chat, prompt=replace(chat.prompt, messages=said[:first] + said[start:]))

    def fits(start: int) -> bool:
        return len(encode_chat(tokenizer, begun_at(start).prompt)) <= room

    return begun_at(starts[bisect_left(starts[:-1], True, key=fits)])


def prepare(
    answer_id: str,
    chat: ChatRequest,
    truncate: bool,
    tokenizer: Tokenizer,
    max_model_len: int,
    config: ModelConfig,
) -> tuple[Job, AnswerPlan]:
    """Raises InvalidRequestError, which names the field at fault."""
    with naming_fields():
        if truncate:
            chat = with_fewer_turns(tokenizer, chat, max_model_len)
        return make_job(answer_id, chat, tokenizer, max_model_len, config)


async def until(stop: asyncio.Event, outputs: Outputs, job: Job) -> Outputs:
    """`outputs` up to when `stop` is set, which aborts them."""
    stopping = asyncio.ensure_future(stop.wait())
    pulling: asyncio.Future[Any] = stopping
    async with aclosing(outputs):
        try:
            while True:
                pulling = asyncio.ensure_future(anext(outputs))
                await asyncio.wait({pulling, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not pulling.done():
                    break
                try:
                    with naming_fields():
                        output = pulling.result()
                except StopAsyncIteration:
                    return
                yield output
        finally:
            for task in (pulling, stopping):
                task.cancel()
            await asyncio.wait({pulling, stopping})
    yield 0, RequestOutput(job.request_id, None, job.token_ids, [], True)


async def create(request: web.Request) -> web.StreamResponse:
    state, arrival = request.app[STATE], time.monotonic()
    store, owner = request.app[STORE], owner_of(request)
    engine = state.ready_engine()
    body = parse_response(read_json(request))
    if body.store and not store.capacity:
        raise refuse("store", True, "false, as the server has --max-stored-responses 0")
    check_model(body.chat.get("model"), state.model_name)
    given = conversation_of(body, store, owner)
    chat = chat_request(body, given, state.limits)
    answer_id, tokenizer = new_item_id("resp"), engine.tokenizer
    how = (tokenizer, engine.max_model_len, engine.config.model)
    args = (answer_id, chat, body.truncate, *how)
    job, plan = await state.in_thread(prepare, *args, slow=chat.may_be_slow)
    is_kept = store.capacity > 0 if body.store is None else body.store
    echo = body.echo | {"store": is_kept}
    formatter = ResponseFormatter(answer_id, state.model_name, echo, chat, plan, tokenizer)
    response = StoredResponse(answer_id, owner, given, formatter, is_kept)
    meter, trace = meter_of(request), trace_of(request)
    running = run(engine, [job], engine.metrics, arrival, meter, trace)
    outputs = until(response.cancelled, running, job)
    store.begin(response)
    try:
        return await respond(request, outputs, formatter, stream=body.stream, num_prompts=1)
    finally:
        formatter.cancel()  # where the client has left in the middle
        response.is_kept &= formatter.has_begun
        store.end(response)


def found(request: web.Request) -> StoredResponse:
    return request.app[STORE].get(request.match_info["response_id"], owner_of(request))


NO_OPS: dict[str, Parse] = {"include_obfuscation": only("false")}
MANY: dict[str, Parse] = {"include": only(LOGPROBS)}


async def retrieve(request: web.Request) -> web.Response:
    response = found(request)
    query(request, {"stream": Field(only("false"))}, NO_OPS, many=MANY)
    return web.json_response(response.body())


async def delete(request: web.Request) -> web.Response:
    response = found(request)
    request.app[STORE].delete(response)
    return web.json_response({"id": response.id, "object": "response", "deleted": True})


async def cancel(request: web.Request) -> web.Response:
    """Of one that has ended, its body: it comes too late, or twice."""
    response = found(request)
    response.cancel()
    with suppress(TimeoutError):  # of a stream that nobody reads
        await asyncio.wait_for(response.ended.wait(), LAST_WORDS_SECONDS)
    return web.json_response(response.body())


PAGE = paging.fields(default=20, most=100)


async def input_items(request: web.Request) -> web.Response:
    response = found(request)
    asked = query(request, PAGE, NO_OPS, many=MANY)
    told = page(response.given[::-1], asked)
    ends = {name: told[name] or "" for name in ("first_id", "last_id")}
    return web.json_response(told | ends)
