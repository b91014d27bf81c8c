"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from aiohttp import web

from llmjax.answers import AnswerPlan, ChatFormat, plan_answer
from llmjax.config import ModelConfig
from llmjax.message import ChatMessage, ToolCall
from llmjax.output import CompletionOutput, RequestOutput

from .accounts import meter_of
from .body import read_json, size_of
from .formatter import ChoicesFormatter, JsonObject, new_id
from .generation import Job, run
from .logprobs import chat_logprobs, prompt_logprobs
from .prompts import encode_chat, fit, fit_beam, must_be_cut_short, truncated
from .schema.chat import ChatRequest, parse_chat
from .schema.fields import refuse
from .schema.sampling import check_model
from .sse import respond
from .state import STATE
from .tracing import trace_of

if TYPE_CHECKING:
    from llmjax.tokenizer import Tokenizer


class ChatFormatter(ChoicesFormatter):
    body_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        answer_id: str,
        model: str,
        request: ChatRequest,
        job: Job,
        plan: AnswerPlan,
        tokenizer: Tokenizer,
    ):
        super().__init__(answer_id, model, request.stream_options)
        self._request = request
        self._job = job
        self._tokenizer = tokenizer
        self._parsers = [plan.parser() for _ in range(request.params.n)]
        self._reasons = plan.reasoning is not None and request.include_reasoning

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
            num_before = self._parsers[choice.index].num_calls
            delta = self._delta(self._message(choice), num_before)
            if delta or choice.finish_reason or choice.logprobs or self._shows_ids(choice):
                choices.append(self._choice(choice, {"delta": delta}))
        return choices

    def choices(self, prompt: int, output: RequestOutput) -> list[JsonObject]:
        choices = []
        for choice in output.outputs:
            said = self._message(choice)
            content = self._echoed + said.content
            message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
            if self._reasons:
                message |= reasoning_fields(said.reasoning or None)
            if said.tool_calls:
                message["content"] = content or None
                message["tool_calls"] = [call.as_dict() for call in said.tool_calls]
            choices.append(self._choice(choice, {"message": message}))
        return choices

    def _message(self, choice: CompletionOutput) -> ChatMessage:
        """What is new of the choice's message."""
        self._parsers[choice.index].read(choice)
        assert choice.message is not None
        counts = [parser.num_reasoning_tokens for parser in self._parsers]
        if any(counts):
            self._usage.reasoning_tokens = sum(count or 0 for count in counts)
        return choice.message

    def _delta(self, news: ChatMessage, num_before: int) -> JsonObject:
        delta: JsonObject = {"content": news.content} if news.content else {}
        if news.reasoning and self._reasons:
            delta |= reasoning_fields(news.reasoning)
        if news.tool_calls:
            begun = accumulate((call.begins for call in news.tool_calls), initial=num_before - 1)
            calls = zip(islice(begun, 1, None), news.tool_calls, strict=True)
            delta["tool_calls"] = [{"index": index, **call_piece(call)} for index, call in calls]
        return delta

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


def call_piece(call: ToolCall) -> JsonObject:
    """Whose call it is stands in the first piece alone."""
    return call.as_dict() if call.begins else {"function": {"arguments": call.arguments}}


def reasoning_fields(text: str | None) -> JsonObject:
    """Under both names that clients know it by."""
    return {"reasoning": text, "reasoning_content": text}


def make_job(
    answer_id: str,
    request: ChatRequest,
    tokenizer: Tokenizer,
    max_model_len: int,
    config: ModelConfig,
) -> tuple[Job, AnswerPlan]:
    """Renders and tokenises the messages, and plans how their answers are read.

    Raises:
        InvalidRequestError: they do not fit, or their tools make no sense.
    """
    prompt = request.prompt
    token_ids = encode_chat(tokenizer, prompt)
    token_ids = truncated(token_ids, request.truncate, request.params, max_model_len)
    params = fit(
        request.params, len(token_ids), max_model_len, default_max_tokens=None, param="messages"
    )
    names = config.tool_call_parser, config.reasoning_parser
    template = prompt.template or tokenizer.tool_template or ""
    form = ChatFormat.of(*names, template)
    budget = params.thinking_token_budget
    if budget is None and form.tags is not None and must_be_cut_short(prompt, template):
        params = replace(params, thinking_token_budget=0)
    begun = prompt.messages[-1]["content"] if prompt.continue_final_message else None
    params, plan = plan_answer(form, request.tools, params, tokenizer, token_ids, begun)
    beam = fit_beam(request.beam, params)
    if beam is not None and params.thinking_token_budget is not None:
        raise refuse("thinking_token_budget", params.thinking_token_budget, "none in a beam search")
    return Job(answer_id, token_ids, params, request.options, beam=beam), plan


async def job_of(request: web.Request, body: ChatRequest, answer_id: str) -> tuple[Job, AnswerPlan]:
    """`make_job`, in a thread where it may take a while. Raises InvalidRequestError."""
    state = request.app[STATE]
    engine = state.ready_engine()
    args = (answer_id, body, engine.tokenizer, engine.max_model_len, engine.config.model)
    if body.may_be_slow:
        return await state.in_thread(make_job, *args, slow=True)
    return await state.computed(size_of(request), make_job, *args)


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    state, arrival = request.app[STATE], time.monotonic()
    engine = state.ready_engine()
    body = parse_chat(read_json(request), state.limits)
    check_model(body.model, state.model_name)
    answer_id = new_id("chatcmpl", body.request_id)
    job, plan = await job_of(request, body, answer_id)
    formatter = ChatFormatter(answer_id, state.model_name, body, job, plan, engine.tokenizer)
    meter, trace = meter_of(request), trace_of(request)
    outputs = run(engine, [job], engine.metrics, arrival, meter, trace)
    return await respond(request, outputs, formatter, stream=body.stream, num_prompts=1)
