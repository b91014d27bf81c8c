"""A JSON object, or a list of them, that is the whole answer: what any model can be bound to."""

from __future__ import annotations

from ..reader import Reader, Reading
from .base import Calls, Frame, Syntax, tell_calls


class PlainJson(Syntax):
    leading = ("{", "[")
    frame = Frame('{"name": "{name}", "arguments": ', "}", ", ", "[", "]")

    def read(self, reader: Reader, calls: Calls) -> Reading[None]:
        yield from tell_calls(reader, calls)
