"""Answers of /v1/responses: items of text, reasoning and calls, whole and as they come.

Source: the schemas Response and ResponseStreamEvent of OpenAI's description of its API.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llmjax.answers import AnswerPlan
from llmjax.message import ChatMessage, ToolCall
from llmjax.output import CompletionOutput, RequestOutput

from .errors import ApiError
from .formatter import Formatter, JsonObject
from .logprobs import chat_logprobs
from .schema.chat import ChatRequest
from .schema.response_items import Item, new_item_id, output_text

if TYPE_CHECKING:
    from llmjax.tokenizer import Tokenizer


@dataclass
class TextItem:
    """A message, or the reasoning before it, as it grows."""

    kind: str
    id: str
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    @property
    def event(self) -> str:
        """What events about the text are called."""
        return "response.reasoning_text" if self.kind == "reasoning" else "response.output_text"

    def part(self) -> Item:
        text = "".join(self.pieces)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return output_text(text, self.logprobs)

    def as_dict(self, status: str, *, has_part: bool = True) -> Item:
        content = [self.part()] if has_part else []
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}


@dataclass
class CallItem:
    """A call, as its arguments grow."""

    id: str
    call: ToolCall
    kind = "function_call"
    event = "response.function_call_arguments"

    def as_dict(self, status: str) -> Item:
        return {
            "id": self.id,
            "type": self.kind,
            "status": status,
            "call_id": self.call.id,
            "name": self.call.name,
            "arguments": self.call.arguments,
        }


Segment = tuple[str, str] | ToolCall
"""("message" or "reasoning", text), or a call or a piece of one."""


def in_order(news: Iterable[ChatMessage]) -> list[Segment]:
    """What was said, one after the other; neighbours of a kind together."""
    segments: list[Segment] = []
    for said in news:
        going_on = [call for call in said.tool_calls if not call.begins]
        for piece in going_on:
            last = segments[-1] if segments else None
            if isinstance(last, ToolCall):
                text = last.arguments + piece.arguments
                segments[-1] = replace(last, arguments=text, ends=piece.ends)
            else:
                segments.append(piece)
        for kind, text in (("reasoning", said.reasoning), ("message", said.content)):
            last = segments[-1] if segments else None
            if isinstance(last, tuple) and last[0] == kind:
                segments[-1] = kind, last[1] + text
            elif text:
                segments.append((kind, text))
        segments += said.tool_calls[len(going_on) :]
    return segments


class ResponseFormatter(Formatter):
    """Its items do not depend on the pieces in which the text came.

    Args:
        echo: what the answer repeats of the request.

    Attributes:
        status: "in_progress" until the answer has ended.
        has_begun: the client was sent something, or will be.
    """

    names_events = True
    ends_with = b""

    def __init__(
        self,
        answer_id: str,
        model: str,
        echo: JsonObject,
        chat: ChatRequest,
        plan: AnswerPlan,
        tokenizer: Tokenizer,
    ):
        super().__init__(answer_id, model, chat.stream_options)
        self._echo, self._params = echo, chat.params
        self._tokenizer = tokenizer
        self._parser = plan.parser()
        # Where text, reasoning and calls may alternate their order is read character by
        # character: of a longer piece the parser tells what there is of each.
        self._mixes = plan.use is not None or plan.reasoning is not None
        self._output: list[Item] = []
        self._open: TextItem | CallItem | None = None
        self._logprobs: list[Any] = []
        self._num_told = 0
        self._num_events = 0
        self._error: JsonObject | None = None
        self._completed: int | None = None
        self._ends = "cancelled"  # unless it says how
        self.status = "in_progress"
        self.has_begun = False

    def begin(self) -> list[JsonObject]:
        self.has_begun = True
        return [self._lifecycle("response.created"), self._lifecycle("response.in_progress")]

    def chunks(self, prompt: int, output: RequestOutput) -> list[JsonObject]:
        self._usage.add(prompt, output)
        events: list[JsonObject] = []
        for choice in output.outputs:
            if choice.logprobs is not None:
                self._logprobs += self._spelled(choice)
            for segment in in_order(self._read(choice)):
                events += self._tell(segment)
            if choice.finish_reason is not None:
                self._ends = "incomplete" if choice.finish_reason == "length" else "completed"
        return events

    def end(self) -> list[JsonObject]:
        if self.status == "in_progress":
            self.status = self._ends
        events: list[JsonObject] = []
        for segment in in_order([self._parser.push("", (), ended=True)]):
            events += self._tell(segment)
        if not self._output and self._open is None:
            events += self._begin_item("message")
        # There is neither an event of its own for what was cancelled, nor a status of items.
        name = "completed" if self.status == "completed" else "incomplete"
        events += self._close(name)
        if self.status == "completed":
            self._completed = int(time.time())
        return [*events, self._lifecycle(f"response.{name}")]

    def error_event(self, error: ApiError) -> JsonObject:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        code = "rate_limit_exceeded" if error.status == 429 else code
        self.status, self._error = "failed", {"code": code, "message": str(error)}
        return self._lifecycle("response.failed")

    def response(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        self.has_begun = True
        for prompt, output in enumerate(outputs):
            self.chunks(prompt, output)
        self.end()
        return self.body()

    def cancel(self) -> None:
        """What came until now is the answer."""
        if self.status == "in_progress":
            self.status = "cancelled"

    def body(self) -> JsonObject:
        """The answer as far as it is there."""
        output = [*self._output]
        if self._open is not None:
            status = "in_progress" if self.status == "in_progress" else "incomplete"
            output.append(self._open.as_dict(status))
        body = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed,
            "status": self.status,
            "error": self._error,
            "incomplete_details": None,
            "model": self._model,
            "output": output,
            "temperature": self._params.temperature,
            "top_p": self._params.top_p,
            **self._echo,
        }
        if self.status == "incomplete":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        if self.status != "in_progress":
            body["usage"] = self._tokens()
        return body

    def _read(self, choice: CompletionOutput) -> Iterator[ChatMessage]:
        """What is new of the message; what the parser holds back comes at the end."""
        pieces = choice.text if self._mixes else [choice.text]
        token_ids: Sequence[int] = choice.token_ids
        for piece in pieces or [""]:
            yield self._parser.push(piece, token_ids, ended=False)
            token_ids = ()
        self._usage.reasoning_tokens = self._parser.num_reasoning_tokens

    def _spelled(self, choice: CompletionOutput) -> list[Any]:
        num_top = self._params.logprobs or 0
        entries = choice.logprobs or []
        return chat_logprobs(self._tokenizer, choice.token_ids, entries, num_top)["content"]

    def _tell(self, segment: Segment) -> list[JsonObject]:
        if isinstance(segment, ToolCall):
            return self._call(segment)
        kind, text = segment
        events = []
        if self._open is None or self._open.kind != kind:
            if self._open is not None or self._output:
                text = text.lstrip()  # what separates it from the item before
            if not text:
                return []
            events = [*self._close("completed"), *self._begin_item(kind)]
        return [*events, *self._delta(text)]

    def _begin_item(self, kind: str) -> list[JsonObject]:
        item = TextItem(kind, new_item_id("rs" if kind == "reasoning" else "msg"))
        self._open = item
        empty = item.as_dict("in_progress", has_part=False)
        return [
            self._about_item("response.output_item.added", item=empty),
            self._about_text("response.content_part.added", part=item.part()),
        ]

    def _delta(self, text: str) -> list[JsonObject]:
        """Text of the open item, with the log-probabilities of the tokens since the last."""
        item = self._open
        assert isinstance(item, TextItem)
        item.pieces.append(text)
        told: JsonObject = {"delta": text}
        if item.kind == "message":
            told["logprobs"] = self._new_logprobs()
            item.logprobs += told["logprobs"]
        return [self._about_text(f"{item.event}.delta", **told)]

    def _new_logprobs(self) -> list[Any]:
        start = max(self._num_told, self._parser.num_reasoning_tokens or 0)
        self._num_told = len(self._logprobs)
        return self._logprobs[start:]

    def _close(self, status: str) -> list[JsonObject]:
        """Ends the open item, if there is one."""
        item = self._open
        if item is None:
            return []
        if isinstance(item, CallItem):
            return self._close_call(item)
        events = []
        if item.kind == "message" and self._num_told < len(self._logprobs):
            events += self._delta("")  # of tokens without a text, as that which ends it
        part = item.part()
        text = {name: part[name] for name in ("text", "logprobs") if name in part}
        done = item.as_dict(status)
        events += [
            self._about_text(f"{item.event}.done", **text),
            self._about_text("response.content_part.done", part=part),
            self._about_item("response.output_item.done", item=done),
        ]
        self._output.append(done)
        self._open = None
        return events

    def _call(self, piece: ToolCall) -> list[JsonObject]:
        """A call, or more of the one that is open."""
        events = []
        if piece.begins:
            events = self._close("completed")
            self._open = CallItem(new_item_id("fc"), replace(piece, arguments="", ends=False))
            empty = self._open.as_dict("in_progress")
            events.append(self._about_item("response.output_item.added", item=empty))
        item = self._open
        assert isinstance(item, CallItem)
        if piece.arguments:
            delta = {"item_id": item.id, "delta": piece.arguments}
            events.append(self._about_item(f"{item.event}.delta", **delta))
        text = item.call.arguments + piece.arguments
        item.call = replace(item.call, arguments=text, ends=piece.ends)
        return [*events, *(self._close("completed") if piece.ends else [])]

    def _close_call(self, item: CallItem) -> list[JsonObject]:
        """One that was cut off, or went wrong, has not been completed."""
        done = item.as_dict("completed" if item.call.ends else "incomplete")
        told = {"item_id": item.id, "name": item.call.name, "arguments": item.call.arguments}
        events = [
            self._about_item(f"{item.event}.done", **told),
            self._about_item("response.output_item.done", item=done),
        ]
        self._output.append(done)
        self._open = None
        return events

    def _about_text(self, event: str, **fields: Any) -> JsonObject:
        assert self._open is not None
        return self._about_item(event, item_id=self._open.id, content_index=0, **fields)

    def _about_item(self, event: str, **fields: Any) -> JsonObject:
        return self._event(event, output_index=len(self._output), **fields)

    def _lifecycle(self, event: str) -> JsonObject:
        return self._event(event, response=self.body())

    def _event(self, event: str, **fields: Any) -> JsonObject:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": event, "sequence_number": number, **fields}

    def _tokens(self) -> JsonObject:
        usage = self._usage.body()
        details = {**usage["prompt_tokens_details"], "cache_write_tokens": 0}
        reasoning = {"reasoning_tokens": self._usage.reasoning_tokens or 0}
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": details,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": reasoning,
            "total_tokens": usage["total_tokens"],
        }
