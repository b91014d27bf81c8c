"""What the answers of all routes that generate have in common."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from llmjax.output import RequestOutput

from .errors import ApiError
from .schema.sampling import StreamOptions
from .usage import Usage

JsonObject = dict[str, Any]


def new_id(prefix: str, asked: str | None = None) -> str:
    """An answer's id: the client's own, or one that no other has."""
    return f"{prefix}-{asked or uuid.uuid4().hex}"


_PLAIN = StreamOptions()


class Formatter(ABC):
    """Turns the outputs of one HTTP request into its body or its events.

    Attributes:
        names_events: events say on the wire what their "type" is.
        ends_with: what ends a stream.
    """

    names_events = False
    ends_with = b"data: [DONE]\n\n"

    def __init__(self, answer_id: str, model: str, options: StreamOptions = _PLAIN):
        self._id = answer_id
        self._created = int(time.time())
        self._model = model
        self._options = options
        self._usage = Usage()

    def begin(self) -> list[JsonObject]:
        """Events before the first output."""
        return []

    @abstractmethod
    def chunks(self, prompt: int, output: RequestOutput) -> list[JsonObject]:
        """Events for the news `output` of prompt number `prompt`."""

    @abstractmethod
    def end(self) -> list[JsonObject]:
        """Events after the last output."""

    def error_event(self, error: ApiError) -> JsonObject:
        """The last event of a stream that fails."""
        return error.body()

    @abstractmethod
    def response(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        """The body of an answer that is not streamed."""


class ChoicesFormatter(Formatter):
    """Of answers that are choices, `n` of each prompt."""

    body_object: str
    chunk_object: str

    @abstractmethod
    def choices(self, prompt: int, output: RequestOutput) -> list[JsonObject]:
        """Whole choices, of an answer that is not streamed."""

    @abstractmethod
    def delta_choices(self, prompt: int, output: RequestOutput) -> list[JsonObject]:
        """What is new in each choice, of a streamed answer; none for a choice without news."""

    def chunks(self, prompt: int, output: RequestOutput) -> list[JsonObject]:
        self._usage.add(prompt, output)
        return [self.chunk([choice]) for choice in self.delta_choices(prompt, output)]

    def end(self) -> list[JsonObject]:
        if not self._options.include_usage:
            return []
        return [{**self._head(self.chunk_object), "choices": [], "usage": self._usage.body()}]

    def response(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        choices = []
        for prompt, output in enumerate(outputs):
            self._usage.add(prompt, output)
            choices += self.choices(prompt, output)
        return {**self._head(self.body_object), "choices": choices, "usage": self._usage.body()}

    def chunk(self, choices: list[JsonObject]) -> JsonObject:
        chunk = {**self._head(self.chunk_object), "choices": choices}
        if self._options.continuous_usage:
            chunk["usage"] = self._usage.body()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _head(self, object_name: str) -> JsonObject:
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
        }
