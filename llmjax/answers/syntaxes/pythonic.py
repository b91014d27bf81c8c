"""`[f(a=1, b="x"), g()]`: Llama 3.2 and 4, OLMo 3, and Gemma 3 as it is often asked to."""

from __future__ import annotations

import re
from typing import Any

from ..json_text import MAX_DEPTH, load_json
from ..reader import MalformedError, Reader, Reading
from .base import Call, Calls, Syntax

_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"\w*")
_SCALAR = re.compile(r"[-+.\w]*")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_WORDS = {"True": True, "False": False, "None": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}


class Pythonic(Syntax):
    markers = ("<|python_start|>", "<|python_tag|>")
    leading = ("[",)
    special = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")

    def read(self, reader: Reader, calls: Calls) -> Reading[None]:
        started = yield from reader.maybe("<|python_start|>")
        if not started:
            yield from reader.maybe("<|python_tag|>")
        found: list[Call] = []

        def item() -> Reading[None]:
            found.append((yield from self._call(reader)))

        yield from reader.literal("[")
        yield from reader.items("]", item)
        if not found:
            raise MalformedError
        if started:
            yield from reader.maybe("<|python_end|>")
        calls.tell(found)

    def _call(self, reader: Reader) -> Reading[Call]:
        name = yield from reader.run(_NAME)
        arguments: dict[str, Any] = {}

        def argument() -> Reading[None]:
            key = yield from reader.run(_KEY)
            yield from reader.space()
            yield from reader.literal("=")
            yield from reader.space()
            arguments[key] = yield from self._value(reader, 0)

        yield from reader.literal("(")
        yield from reader.items(")", argument)
        return Call(name, arguments)

    def _value(self, reader: Reader, depth: int) -> Reading[Any]:
        """A literal of Python; JSON's true, false and null too."""
        if depth > MAX_DEPTH:
            raise MalformedError
        members: dict[Any, Any] = {}
        items: list[Any] = []

        def member() -> Reading[None]:
            key = yield from self._string(reader)
            yield from reader.space()
            yield from reader.literal(":")
            yield from reader.space()
            members[key] = yield from self._value(reader, depth + 1)

        def item() -> Reading[None]:
            items.append((yield from self._value(reader, depth + 1)))

        first = yield from reader.peek()
        if first and first in "'\"":
            return (yield from self._string(reader))
        if (yield from reader.maybe("{")):
            yield from reader.items("}", member)
            return members
        for opening, closing in ("[]", "()"):
            if (yield from reader.maybe(opening)):
                yield from reader.items(closing, item)
                return items
        word = yield from reader.run(_SCALAR)
        return _WORDS[word] if word in _WORDS else load_json(word)

    def _string(self, reader: Reader) -> Reading[str]:
        quote = yield from reader.peek()
        if quote not in _PLAIN:
            raise MalformedError
        reader.at += 1
        text = ""
        while True:
            text += yield from reader.run(_PLAIN[quote])
            if (yield from reader.maybe(quote)):
                return text
            yield from reader.literal("\\")
            text += yield from self._escape(reader)

    def _escape(self, reader: Reader) -> Reading[str]:
        char = yield from reader.peek()
        if not char:
            raise MalformedError
        reader.at += 1
        if char not in _DIGITS:
            return _ESCAPES.get(char, char if char in "\\'\"" else f"\\{char}")
        digits = ""
        for _ in range(_DIGITS[char]):
            digits += yield from reader.peek()
            reader.at += 1
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError):
            raise MalformedError from None
