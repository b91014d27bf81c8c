"""`{"name": ..., "parameters": {...}}`, also behind `<|python_tag|>`: Llama 3.1 and later."""

from __future__ import annotations

from ..reader import MalformedError, Reader, Reading
from .base import Calls, Frame, Syntax, tell_call


class Llama3Json(Syntax):
    markers = ("<|python_tag|>",)
    leading = ("{",)
    special = ("<|python_tag|>",)
    frame = Frame('{"name": "{name}", "parameters": ', "}", None)

    def read(self, reader: Reader, calls: Calls) -> Reading[None]:
        if (yield from reader.maybe("<|python_tag|>")):
            yield from reader.space()
        yield from tell_call(reader, calls)
        while (yield from reader.attempt(self._semicolon(reader))) is not MalformedError:
            yield from tell_call(reader, calls)

    def _semicolon(self, reader: Reader) -> Reading[None]:
        """What is between two calls."""
        yield from reader.space()
        yield from reader.literal(";")
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            raise MalformedError
