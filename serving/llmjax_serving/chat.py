"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from llmjax.request import CompletionOutput, RequestOutput

from .accounts import meter_of
from .body import read_json
from .formatter import Formatter, JsonObject, new_id
from .generation import Job, run
from .logprobs import chat_logprobs, prompt_logprobs
from .prompts import encode_chat, fit, fit_beam, truncated
from .schema.chat import ChatRequest, parse_chat
from .schema.sampling import check_model
from .sse import respond
from .state import STATE

if TYPE_CHECKING:
    from llmjax.tokenizer import Tokenizer


class ChatFormatter(Formatter):
    body_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, answer_id: str, model: str, request: ChatRequest, job: Job, tokenizer: Tokenizer
    ):
        super().__init__(answer_id, model, request.stream_options)
        self._request = request
        self._job = job
        self._tokenizer = tokenizer

    def begin(self) -> list[JsonObject]:
        extra = self._prompt_token_ids()
        delta = {"role": "assistant", "content": self._echoed}
        empty = {"logprobs": None, "finish_reason": None}
        return [
            self.chunk([{"index": index, "delta": delta, **empty}]) | extra
            for index in range(self._request.params.n)
        ]

    def delta_choices(self, prompt: int, output: RequestOutput) -> list[JsonObject]:
        choices = []
        for choice in output.outputs:
            if choice.text or choice.finish_reason or choice.logprobs or self._shows_ids(choice):
                delta = {"content": choice.text} if choice.text else {}
                choices.append(self._choice(choice, {"delta": delta}))
        return choices

    def choices(self, prompt: int, output: RequestOutput) -> list[JsonObject]:
        return [
            self._choice(
                choice,
                {"message": self._message(choice)},
            )
            for choice in output.outputs
        ]

    def _message(self, choice: CompletionOutput) -> JsonObject:
        return {"role": "assistant", "content": self._echoed + choice.text, "refusal": None}

    @property
    def _echoed(self) -> str:
        last = self._request.prompt.messages[-1]
        return last["content"] if self._request.echo and last["role"] == "assistant" else ""

    def response(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        body = super().response(outputs) | self._prompt_token_ids()
        entries = outputs[0].prompt_logprobs
        if self._request.params.prompt_logprobs is not None and entries is not None:
            body["prompt_logprobs"] = prompt_logprobs(entries)
        return body

    def _choice(self, choice: CompletionOutput, said: JsonObject) -> JsonObject:
        logprobs = None
        if choice.logprobs is not None:
            num_top = self._request.params.logprobs or 0
            logprobs = chat_logprobs(
                self._tokenizer,
                choice.token_ids,
                choice.logprobs,
                num_top,
                tokens_as_ids=self._request.tokens_as_ids,
            )
        body = {
            "index": choice.index,
            **said,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._request.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def _shows_ids(self, choice: CompletionOutput) -> bool:
        return self._request.return_token_ids and bool(choice.token_ids)

    def _prompt_token_ids(self) -> JsonObject:
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": self._job.token_ids}


def make_job(answer_id: str, request: ChatRequest, tokenizer: Tokenizer, max_model_len: int) -> Job:
    """Renders and tokenises the messages. Raises InvalidRequestError where they do not fit."""
    token_ids = encode_chat(tokenizer, request.prompt)
    token_ids = truncated(token_ids, request.truncate, request.params, max_model_len)
    params = fit(
        request.params, len(token_ids), max_model_len, default_max_tokens=None, param="messages"
    )
    beam = fit_beam(request.beam, params)
    return Job(answer_id, token_ids, params, request.options, beam=beam)


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    state, arrival = request.app[STATE], time.monotonic()
    engine = state.ready_engine()
    body = parse_chat(await read_json(request), state.limits)
    check_model(body.model, state.model_name)
    answer_id = new_id("chatcmpl", body.request_id)
    job = await state.in_thread(make_job, answer_id, body, engine.tokenizer, engine.max_model_len)
    formatter = ChatFormatter(answer_id, state.model_name, body, job, engine.tokenizer)
    outputs = run(engine, [job], engine.metrics, arrival, meter_of(request))
    return await respond(request, outputs, formatter, stream=body.stream, num_prompts=1)
