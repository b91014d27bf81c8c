"""A JSON object, or a list of them, that is the whole answer: what any model can be bound to."""

from __future__ import annotations

from ..reader import Reader, Reading
from .base import Call, Frame, Syntax, calls_of


class PlainJson(Syntax):
    leading = ("{", "[")
    frame = Frame('{"name": "{name}", "arguments": ', "}", ", ", "[", "]")

    def read(self, reader: Reader) -> Reading[list[Call]]:
        return calls_of((yield from reader.json()))
