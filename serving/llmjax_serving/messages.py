"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from aiohttp import web

from llmjax.answers import AnswerPlan
from llmjax.message import ChatMessage, ToolCall
from llmjax.output import CompletionOutput, RequestOutput

from .accounts import meter_of
from .body import read_json
from .chat import job_of
from .errors import ApiError
from .formatter import Formatter, JsonObject, new_id
from .generation import Job, run
from .prompts import encode_chat
from .schema.messages import naming_fields, parse_count, parse_messages
from .schema.sampling import check_model
from .sse import respond
from .state import STATE
from .tracing import trace_of

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> JsonObject:
    """Anthropic's shape of a failure."""
    kind = _ERROR_TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


class MessagesFormatter(Formatter):
    names_events = True
    ends_with = b""

    def __init__(self, answer_id: str, model: str, job: Job, plan: AnswerPlan):
        super().__init__(answer_id, model)
        self._job, self._parser = job, plan.parser()
        self._index, self._open = -1, ""
        self._ended: JsonObject = {}

    def response(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        (output,) = outputs
        self._usage.add(0, output)
        choice = output.outputs[0]
        said = self._read(choice)
        content: list[JsonObject] = []
        if said.reasoning:
            content.append({"type": "thinking", "thinking": said.reasoning, "signature": ""})
        if said.content or not said.tool_calls:
            content.append({"type": "text", "text": said.content})
        content += [
            {
                "type": "tool_use",
                "id": call.id,
                "name": call.name,
                "input": json.loads(call.arguments) if call.ends else {},
            }
            for call in said.tool_calls
        ]
        return self._message(content) | self._ended | {"usage": self._tokens()}

    def begin(self) -> list[JsonObject]:
        usage = {"input_tokens": len(self._job.token_ids), "output_tokens": 0}
        message = self._message([]) | {"usage": usage}
        return [{"type": "message_start", "message": message}]

    def chunks(self, prompt: int, output: RequestOutput) -> list[JsonObject]:
        self._usage.add(prompt, output)
        events: list[JsonObject] = []
        for choice in output.outputs:
            said = self._read(choice)
            going_on = [call for call in said.tool_calls if not call.begins]
            for call in going_on:
                events += self._in_tool_use(call)
            if said.reasoning:
                delta = {"type": "thinking_delta", "thinking": said.reasoning}
                events += self._in_block("thinking", {"thinking": "", "signature": ""}, delta)
            if said.content:
                delta = {"type": "text_delta", "text": said.content}
                events += self._in_block("text", {"text": ""}, delta)
            for call in said.tool_calls[len(going_on) :]:
                events += [*self._close(), *self._in_tool_use(call)]
        return events

    def end(self) -> list[JsonObject]:
        events = self._close()
        if self._index < 0:
            events = [*self._in_block("text", {"text": ""}, None), *self._close()]
        told = {"type": "message_delta", "delta": self._ended, "usage": self._tokens()}
        return [*events, told, {"type": "message_stop"}]

    def error_event(self, error: ApiError) -> JsonObject:
        return error_body(error)

    def _in_block(self, kind: str, empty: JsonObject, delta: JsonObject | None) -> list[JsonObject]:
        """A delta within a block of its kind, which is begun where it is not open."""
        events = []
        if self._open != kind:
            events += self._close()
            self._index, self._open = self._index + 1, kind
            block = {"type": kind, **empty}
            events.append(
                {"type": "content_block_start", "index": self._index, "content_block": block}
            )
        if delta is not None:
            events.append({"type": "content_block_delta", "index": self._index, "delta": delta})
        return events

    def _in_tool_use(self, call: ToolCall) -> list[JsonObject]:
        empty = {"id": call.id, "name": call.name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return self._in_block("tool_use", empty, delta)

    def _close(self) -> list[JsonObject]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": self._index}]

    def _read(self, choice: CompletionOutput) -> ChatMessage:
        self._parser.read(choice)
        assert choice.message is not None
        stop = choice.stop_reason
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        reason = reasons.get(choice.finish_reason or "", "end_turn")
        if isinstance(stop, str):
            reason = "stop_sequence"
        self._ended = {
            "stop_reason": reason if choice.finish_reason else None,
            "stop_sequence": stop if isinstance(stop, str) else None,
        }
        return choice.message

    def _message(self, content: list[JsonObject]) -> JsonObject:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _tokens(self) -> JsonObject:
        usage = self._usage.body()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


async def create_message(request: web.Request) -> web.StreamResponse:
    state, arrival = request.app[STATE], time.monotonic()
    engine = state.ready_engine()
    body = parse_messages(read_json(request), state.limits)
    check_model(body.model, state.model_name)
    answer_id = new_id("msg")
    with naming_fields():
        job, plan = await job_of(request, body, answer_id)
    formatter = MessagesFormatter(answer_id, state.model_name, job, plan)
    meter, trace = meter_of(request), trace_of(request)
    outputs = run(engine, [job], engine.metrics, arrival, meter, trace)
    return await respond(request, outputs, formatter, stream=body.stream, num_prompts=1)


async def count_tokens(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.ready_engine()
    body = parse_count(read_json(request), state.limits)
    check_model(body.model, state.model_name)
    token_ids = await state.in_thread(encode_chat, engine.tokenizer, body.prompt)
    return web.json_response({"input_tokens": len(token_ids)})
