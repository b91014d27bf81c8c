"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 Pro, Qwen 2.5 and 3.

Qwen 2.5 Coder, which is given the same template, writes the object as a block of code instead.
"""

from __future__ import annotations

from ..reader import Reader, Reading
from .base import Calls, Frame, Syntax, tell_call


class Hermes(Syntax):
    markers = ("<tool_call>", "```json")
    special = ("<tool_call>", "</tool_call>")
    frame = Frame('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "\n")
    tagged = True

    def read(self, reader: Reader, calls: Calls) -> Reading[None]:
        closing = "```" if (yield from reader.maybe("```json")) else "</tool_call>"
        if closing != "```":
            yield from reader.literal("<tool_call>")
        yield from reader.space()
        # To the end of the JSON: its strings may hold what closes it.
        yield from tell_call(reader, calls)
        yield from reader.space()
        yield from reader.literal(closing)
