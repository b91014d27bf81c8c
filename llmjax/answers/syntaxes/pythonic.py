"""`[f(a=1, b="x"), g()]`: Llama 3.2 and 4, OLMo 3, and Gemma 3 as it is often asked to."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..json_text import MAX_DEPTH, SCALAR, JsonTeller, check_scalar, hex_digit
from ..reader import MalformedError, Reader, Reading
from .base import Calls, Syntax, arguments_teller

_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"\w*")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_LISTS = {"[": "]", "(": ")"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
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
        is_empty = True

        def item() -> Reading[None]:
            nonlocal is_empty
            is_empty = False
            yield from self._call(reader, calls)

        yield from reader.literal("[")
        yield from reader.items("]", item)
        if is_empty:
            raise MalformedError
        if started:
            yield from reader.maybe("<|python_end|>")

    def _call(self, reader: Reader, calls: Calls) -> Reading[None]:
        """One begins with its first argument's value: until then it may be a list of anything."""
        name = yield from reader.run(_NAME)
        json = arguments_teller(calls, name)

        def argument() -> Reading[None]:
            json.key((yield from reader.run(_KEY)))
            yield from reader.space()
            yield from reader.literal("=")
            yield from reader.space()
            yield from self._value(reader, json, 0)

        yield from reader.literal("(")
        json.hold("{")
        yield from json.items(reader, ")", "}", argument)
        calls.end()

    def _value(self, reader: Reader, json: JsonTeller, depth: int) -> Reading[None]:
        """A literal of Python; JSON's true, false and null too."""
        if depth > MAX_DEPTH:
            raise MalformedError

        def member() -> Reading[None]:
            pieces: list[str] = []
            yield from self._characters(reader, (yield from self._quote(reader)), pieces.append)
            json.key("".join(pieces))
            yield from reader.space()
            yield from reader.literal(":")
            yield from reader.space()
            yield from item()

        def item() -> Reading[None]:
            yield from self._value(reader, json, depth + 1)

        first = yield from reader.peek()
        if first in _PLAIN:
            quote = yield from self._quote(reader)
            json.say('"')
            yield from self._characters(reader, quote, json.characters)
            json.say('"')
        elif (yield from reader.maybe("{")):
            json.say("{")
            yield from json.items(reader, "}", "}", member)
        elif first in _LISTS:
            yield from reader.literal(first)
            json.say("[")
            yield from json.items(reader, _LISTS[first], "]", item)
        else:
            word = yield from reader.run(SCALAR)
            if word not in _WORDS:
                check_scalar(word)
            json.say(_WORDS.get(word, word))

    def _quote(self, reader: Reader) -> Reading[str]:
        quote = yield from reader.peek()
        if quote not in _PLAIN:
            raise MalformedError
        reader.at += 1
        return quote

    def _characters(self, reader: Reader, quote: str, tell: Callable[[str], None]) -> Reading[None]:
        """Of a string, up to the quote that ends it."""
        while True:
            yield from reader.tell_run(_PLAIN[quote], tell)
            if (yield from reader.maybe(quote)):
                return
            yield from reader.literal("\\")
            tell((yield from self._escape(reader)))

    def _escape(self, reader: Reader) -> Reading[str]:
        char = yield from reader.peek()
        if not char:
            raise MalformedError
        reader.at += 1
        if char not in _DIGITS:
            return _ESCAPES.get(char, char if char in "\\'\"" else f"\\{char}")
        digits = ""
        for _ in range(_DIGITS[char]):
            digits += yield from hex_digit(reader)
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError):
            raise MalformedError from None
