"""JSON that is still being written, told as far as it is sure to be JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from .reader import MalformedError, Reader, Reading

MAX_DEPTH = 64
"""Of values within values."""

_PLAIN = re.compile(r'[^"\\]*')
SCALAR = re.compile(r"[-+.\w]*")
_CONTROL = re.compile(r"[\x00-\x1f]")
_OTHER_SPACE = re.compile(r"[^\S \t\n\r]")
_HEX = frozenset("0123456789abcdefABCDEF")


def read_json(reader: Reader) -> Reading[Any]:
    """The value of JSON. Line breaks in its strings are let pass, as models write them."""
    pieces: list[str] = []
    yield from _Json(reader, pieces.append).value(0)
    return load_json("".join(pieces))


def tell_object(reader: Reader, tell: Callable[[str], None]) -> Reading[None]:
    """An object, whose text is told as it is read: what was told begins some JSON.

    It is told as it is written, but for line breaks in its strings, which become what they mean.
    """
    if (yield from reader.peek()) != "{":
        raise MalformedError
    yield from _Json(reader, tell).value(0)


class _Json:
    """Attributes:
    told: how far the reader's text has been told.
    """

    def __init__(self, reader: Reader, tell: Callable[[str], None]):
        self._reader, self._tell = reader, tell
        self._told = reader.at

    def value(self, depth: int) -> Reading[None]:
        reader = self._reader
        if depth > MAX_DEPTH:
            raise MalformedError

        def value() -> Reading[None]:
            yield from self.value(depth + 1)

        def member() -> Reading[None]:
            yield from self._string()
            yield from reader.space()
            yield from reader.literal(":")
            yield from reader.space()
            yield from value()

        first = yield from reader.peek()
        if first == '"':
            yield from self._string()
        elif first in ("{", "["):
            reader.at += 1
            self._say()
            yield from reader.items(*(("}", member) if first == "{" else ("]", value)))
        else:
            yield from read_scalar(reader)
        self._say()

    def _say(self) -> None:
        """Tells what has been read, none of it within a string."""
        reader = self._reader
        text = reader.text[self._told : reader.at]
        if _OTHER_SPACE.search(text):
            raise MalformedError
        self._told = reader.at
        if text:
            self._tell(text)

    def _say_plain(self, text: str) -> None:
        """Tells what has been read of a string."""
        self._told = self._reader.at
        self._tell(_CONTROL.sub(_escaped, text))

    def _string(self) -> Reading[None]:
        reader = self._reader
        yield from reader.literal('"')
        self._say()
        while True:
            yield from reader.tell_run(_PLAIN, self._say_plain)
            if (yield from reader.maybe('"')):
                return
            yield from self._escape()
            self._say()

    def _escape(self) -> Reading[None]:
        """Halves of a character come together or not at all."""
        code = yield from self._escape_code()
        if 0xD800 <= code < 0xDC00:
            other = yield from self._escape_code()
            if not 0xDC00 <= other < 0xE000:
                raise MalformedError
        elif 0xDC00 <= code < 0xE000:
            raise MalformedError

    def _escape_code(self) -> Reading[int]:
        """The number of the character that it stands for, where it is written as one."""
        reader = self._reader
        yield from reader.literal("\\")
        char = yield from reader.peek()
        if char not in tuple('"\\/bfnrtu'):
            raise MalformedError
        reader.at += 1
        digits = ""
        while char == "u" and len(digits) < 4:
            digits += yield from hex_digit(reader)
        return int(digits or "0", 16)


def hex_digit(reader: Reader) -> Reading[str]:
    digit = yield from reader.peek()
    if digit not in _HEX:
        raise MalformedError
    reader.at += 1
    return digit


def read_scalar(reader: Reader) -> Reading[str]:
    """A number, true, false or null, as it is written."""
    word = yield from reader.run(SCALAR)
    check_scalar(word)
    return word


def check_scalar(word: str) -> None:
    value = load_json(word)
    if isinstance(value, float) and not math.isfinite(value):
        raise MalformedError


class JsonTeller:
    """Tells the JSON of values that are written in another way, as far as it is sure: in pieces
    that make what `dump_json` makes of the whole, but for numbers, which stay as they are written.

    What is called raises MalformedError where JSON has no such text or number.
    """

    def __init__(self, tell: Callable[[str], None]):
        self._tell, self._held = tell, ""

    def hold(self, text: str) -> None:
        """Text that is told with what comes next, and not at all where nothing does."""
        self._held += text

    def say(self, text: str) -> None:
        text, self._held = self._held + text, ""
        self._tell(text)

    def key(self, key: str) -> None:
        """Of a member whose value comes next."""
        self.hold(f"{dump_json(key)}: ")

    def characters(self, text: str) -> None:
        """Of a string, between its quotes."""
        if text:
            self.say(dump_json(text)[1:-1])

    def items(
        self, reader: Reader, close: str, closing: str, read_item: Callable[[], Reading[None]]
    ) -> Reading[None]:
        """Reads items up to `close`, as `Reader.items`, and says commas and `closing`."""
        separator = ""

        def item() -> Reading[None]:
            nonlocal separator
            self.hold(separator)
            separator = ", "
            yield from read_item()

        yield from reader.items(close, item)
        self.say(closing)


def _escaped(control: re.Match[str]) -> str:
    return json.dumps(control[0])[1:-1]


def load_json(text: str) -> Any:
    """Raises MalformedError where it is no JSON."""

    def refuse(constant: str) -> None:
        raise MalformedError

    try:
        return json.loads(text, strict=False, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise MalformedError from None


def dump_json(value: Any) -> str:
    """Raises MalformedError where it cannot be sent: an infinity, half of a surrogate pair."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        raise MalformedError from None
    return text
