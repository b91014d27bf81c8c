"""From an answer's text to content and calls, as it comes."""

from __future__ import annotations

from collections.abc import Collection

from ..message import ChatMessage, ToolCall
from .reader import MalformedError, Reader, Reading, dump_json
from .syntaxes import Syntax


class CallParser:
    """Takes the calls out of a text.

    A call is given out when it is complete: until then it may turn out to be none, and is content
    then, to the letter. Space around calls is dropped.

    Args:
        names: of the functions there are; a call of another is content.
        most: calls that are given out; what comes after them is dropped.
    """

    def __init__(self, syntax: Syntax, names: Collection[str], most: int | None = None):
        self._syntax, self._names, self._most = syntax, names, most
        self._reader = Reader()
        self._news = ChatMessage()
        self._space = ""
        self._num_calls = 0
        self._reading = self._read()

    def push(self, text: str) -> ChatMessage:
        """What is new with `text`."""
        self._reader.text += text
        return self._go_on()

    def finish(self) -> ChatMessage:
        """The rest, as nothing more will come."""
        self._reader.ended = True
        return self._go_on()

    def _go_on(self) -> ChatMessage:
        next(self._reading, None)
        news, self._news = self._news, ChatMessage()
        return news

    def _read(self) -> Reading[None]:
        reader, leading = self._reader, self._syntax.leading
        self._say((yield from reader.space()))
        first = yield from reader.peek()
        may_call = bool(first) and first in leading
        while may_call or (yield from self._find_marker()):
            reader.forget()
            may_call = False
            calls = yield from reader.attempt(self._calls())
            if isinstance(calls, list):
                self._give(calls)
            else:
                self._say(reader.text[:1])
                reader.at = 1
        if not self._num_calls:
            self._news.content += self._space

    def _find_marker(self) -> Reading[bool]:
        """Says what comes before the next marker; False where there is none to the end."""
        reader, markers = self._reader, self._syntax.markers
        while True:
            found = [at for m in markers if (at := reader.text.find(m, reader.at)) >= 0]
            end = min(found, default=len(reader.text))
            if not found and not reader.ended:
                end -= ending_prefix(reader.text[reader.at :], markers)
            self._say(reader.text[reader.at : end])
            reader.at = end
            if found or reader.ended:
                return bool(found)
            reader.forget()
            yield

    def _calls(self) -> Reading[list[ToolCall]]:
        calls = yield from self._syntax.read(self._reader)
        if any(call.name not in self._names for call in calls):
            raise MalformedError
        new_id = self._syntax.new_id
        return [ToolCall(new_id(), call.name, dump_json(call.arguments)) for call in calls]

    def _give(self, calls: list[ToolCall]) -> None:
        self._space = ""
        room = len(calls) if self._most is None else self._most - self._num_calls
        self._news.tool_calls += calls[:room]
        self._num_calls += len(calls[:room])

    def _say(self, text: str) -> None:
        """Content; space at its end waits for what comes after it."""
        said = (self._space + text).rstrip()
        self._space = (self._space + text)[len(said) :]
        if self._most is None or self._num_calls < self._most:
            self._news.content += said


def ending_prefix(text: str, markers: Collection[str]) -> int:
    """Length of the longest end of `text` with which a marker begins."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if marker.startswith(text[-size:]):
                longest = size
                break
    return longest
