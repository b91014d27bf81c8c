"""From an answer's text to content and calls, as it comes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..message import ChatMessage, ToolCall
from .json_text import dump_json
from .reader import MalformedError, Reader, Reading, ending_prefix
from .syntaxes import Call, Syntax


class CallParser:
    """Takes the calls out of a text, and is told of them by a syntax (`syntaxes.Calls`).

    A call is given out from where its arguments begin, as they come: it is a call then, also where
    it is cut off or goes wrong, and what comes behind that is content. What turns out to be no call
    before is content to the letter. Space around calls is dropped.

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
        self._open: ToolCall | None = None
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
            try:
                yield from self._syntax.read(reader, self)
            except MalformedError:
                reader.at = reader.kept
                if not reader.kept:
                    self._say(reader.text[:1])
                    reader.at = 1
            self._open = None
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

    def tell(self, call: Call) -> None:
        arguments = dump_json(call.arguments)
        self.begin(call.name)
        self.add(arguments)
        self.end()

    def begin(self, name: str) -> None:
        if name not in self._names:
            raise MalformedError
        self._reader.keep()
        self._space = ""
        self._open = None
        if self._most is None or self._num_calls < self._most:
            self._num_calls += 1
            self._open = ToolCall(self._syntax.new_id(), name, "", begins=True, ends=False)
            self._give()

    def add(self, arguments: str) -> None:
        self._reader.keep()
        if self._open is not None:
            self._open = replace(self._open, arguments=arguments)
            self._give()

    def end(self) -> None:
        if self._open is not None:
            self._open = replace(self._open, arguments="", ends=True)
            self._give()
            self._open = None

    def _give(self) -> None:
        """The open call's next piece."""
        assert self._open is not None
        self._news.add(ChatMessage(tool_calls=[self._open]))
        self._open = replace(self._open, begins=False)

    def _say(self, text: str) -> None:
        """Content; space at its end waits for what comes after it."""
        said = (self._space + text).rstrip()
        self._space = (self._space + text)[len(said) :]
        if self._most is None or self._num_calls < self._most:
            self._news.content += said
