"""Reading a text that is still being written.

A parser is a generator that is written as if it had the whole text. Where it needs a character
that is not there yet it yields, and goes on when there is more; so what it makes of a text cannot
depend on the pieces in which the text came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields where it waits for more text; returns a T."""

MAX_DEPTH = 64
"""Of values within values."""

_SPACE = re.compile(r"\s*")
_PLAIN = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.\w]*")


class MalformedError(Exception):
    """The text is not what a parser reads."""


class Reader:
    """Attributes:
    text, at: what there is, and where the next character to be read is.
    ended: nothing will be added to `text`.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def forget(self) -> None:
        """Lets go of what has been read."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Reading[str]:
        """The next character, which stays; "" at the end."""
        while self.at >= len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def literal(self, wanted: str) -> Reading[None]:
        """Raises MalformedError at the first character that differs."""
        for char in wanted:
            if (yield from self.peek()) != char:
                raise MalformedError
            self.at += 1

    def maybe(self, wanted: str) -> Reading[bool]:
        """Reads `wanted` where it is there; else nothing."""
        return (yield from self.attempt(self.literal(wanted))) is not MalformedError

    def attempt(self, reading: Reading[T]) -> Reading[T | type[MalformedError]]:
        """What `reading` returns; where it fails the class MalformedError, and nothing is read."""
        start = self.at
        try:
            return (yield from reading)
        except MalformedError:
            self.at = start
            return MalformedError

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The longest run of characters of a class, as a pattern `[...]*`."""
        start = self.at
        while (yield from self.peek()):
            match = pattern.match(self.text, self.at)
            if match is None or match.end() == self.at:
                break
            self.at = match.end()
        return self.text[start : self.at]

    def space(self) -> Reading[str]:
        return (yield from self.run(_SPACE))

    def until(self, mark: str) -> Reading[str]:
        """What comes before `mark`, which is read too; MalformedError where it never comes."""
        start = self.at
        while (found := self.text.find(mark, self.at)) < 0:
            if self.ended:
                raise MalformedError
            self.at = max(self.at, len(self.text) - len(mark) + 1)
            yield
        self.at = found + len(mark)
        return self.text[start:found]

    def items(self, close: str, read_item: Callable[[], Reading[None]]) -> Reading[None]:
        """Reads items with commas between, up to `close`."""
        yield from self.space()
        if (yield from self.maybe(close)):
            return
        while True:
            yield from self.space()
            yield from read_item()
            yield from self.space()
            if (yield from self.maybe(close)):
                return
            yield from self.literal(",")

    def json(self) -> Reading[Any]:
        """An object or a list. Line breaks in its strings are let pass, as models write them."""
        yield from self.space()
        start = self.at
        if (yield from self.peek()) not in ("{", "["):
            raise MalformedError
        yield from self._json(0)
        return load_json(self.text[start : self.at])

    def _json(self, depth: int) -> Reading[None]:
        """Finds the end of a value; what it is worth `load_json` says."""
        if depth > MAX_DEPTH:
            raise MalformedError

        def value() -> Reading[None]:
            yield from self._json(depth + 1)

        def member() -> Reading[None]:
            yield from self._string()
            yield from self.space()
            yield from self.literal(":")
            yield from self.space()
            yield from value()

        first = yield from self.peek()
        if first == '"':
            yield from self._string()
        elif first == "{":
            self.at += 1
            yield from self.items("}", member)
        elif first == "[":
            self.at += 1
            yield from self.items("]", value)
        elif not (yield from self.run(_SCALAR)):
            raise MalformedError

    def _string(self) -> Reading[None]:
        yield from self.literal('"')
        while True:
            yield from self.run(_PLAIN)
            if (yield from self.maybe('"')):
                return
            yield from self.literal("\\")
            if not (yield from self.peek()):
                raise MalformedError
            self.at += 1


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
