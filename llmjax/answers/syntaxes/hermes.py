"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 Pro, Qwen 2.5 and 3.

Qwen 2.5 Coder, which is given the same template, writes the object as a block of code instead.
"""

from __future__ import annotations

from ..reader import Reader, Reading
from .base import Call, Frame, Syntax, call_of


class Hermes(Syntax):
    markers = ("<tool_call>", "```json")
    special = ("<tool_call>", "</tool_call>")
    frame = Frame('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "\n")
    tagged = True

    def read(self, reader: Reader) -> Reading[list[Call]]:
        closing = "```" if (yield from reader.maybe("```json")) else "</tool_call>"
        if closing != "```":
            yield from reader.literal("<tool_call>")
        # To the end of the JSON: its strings may hold what closes it.
        value = yield from reader.json()
        yield from reader.space()
        yield from reader.literal(closing)
        return [call_of(value)]
