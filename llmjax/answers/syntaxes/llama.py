"""`{"name": ..., "parameters": {...}}`, also behind `<|python_tag|>`: Llama 3.1 and later."""

from __future__ import annotations

from ..reader import MalformedError, Reader, Reading
from .base import Call, Frame, Syntax, call_of


class Llama3Json(Syntax):
    markers = ("<|python_tag|>",)
    leading = ("{",)
    special = ("<|python_tag|>",)
    frame = Frame('{"name": "{name}", "parameters": ', "}", None)

    def read(self, reader: Reader) -> Reading[list[Call]]:
        yield from reader.maybe("<|python_tag|>")
        calls = [call_of((yield from reader.json()))]
        while True:
            more = yield from reader.attempt(self._next(reader))
            if not isinstance(more, Call):
                return calls
            calls.append(more)

    def _next(self, reader: Reader) -> Reading[Call]:
        """Several calls have semicolons between them."""
        yield from reader.space()
        yield from reader.literal(";")
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            raise MalformedError
        return call_of((yield from reader.json()))
