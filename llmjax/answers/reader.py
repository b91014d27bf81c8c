"""Reading a text that is still being written.

A parser is a generator that is written as if it had the whole text. Where it needs a character
that is not there yet it yields, and goes on when there is more; so what it makes of a text cannot
depend on the pieces in which the text came.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields where it waits for more text; returns a T."""

_SPACE = re.compile(r"\s*")


class MalformedError(Exception):
    """The text is not what a parser reads."""


class Reader:
    """Attributes:
    text, at: what there is, and where the next character to be read is.
    kept: what is before it is not to be read again.
    ended: nothing will be added to `text`.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = self.kept = 0
        self.ended = False

    def forget(self) -> None:
        """Lets go of what has been read."""
        self.text, self.at, self.kept = self.text[self.at :], 0, 0

    def keep(self) -> None:
        """What has been read stays read, whatever comes."""
        self.kept = self.at

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
        """What `reading` returns; where it fails the class MalformedError, and nothing is read.

        But for what is to be kept.
        """
        start = self.at
        try:
            return (yield from reading)
        except MalformedError:
            self.at = max(start, self.kept)
            return MalformedError

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The longest run of characters of a class, as a pattern `[...]*`."""
        pieces: list[str] = []
        yield from self.tell_run(pattern, pieces.append)
        return "".join(pieces)

    def tell_run(self, pattern: re.Pattern[str], tell: Callable[[str], None]) -> Reading[None]:
        """The same, told as it comes."""
        while (yield from self.peek()):
            match = pattern.match(self.text, self.at)
            if match is None or match.end() == self.at:
                break
            self.at = match.end()
            tell(match[0])

    def space(self) -> Reading[str]:
        return (yield from self.run(_SPACE))

    def until(self, mark: str) -> Reading[str]:
        """What comes before `mark`, which is read too; MalformedError where it never comes."""
        pieces: list[str] = []
        yield from self.tell_until(mark, pieces.append)
        return "".join(pieces)

    def tell_until(self, mark: str, tell: Callable[[str], None]) -> Reading[None]:
        """The same, told as it comes: all but what `mark` may begin with."""
        while True:
            found = self.text.find(mark, self.at)
            start, end = self.at, found
            if found < 0:
                end = len(self.text) - ending_prefix(self.text[start:], (mark,))
            self.at = end
            if end > start:
                tell(self.text[start:end])
            if found >= 0:
                self.at += len(mark)
                return
            if self.ended:
                raise MalformedError
            yield

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


def ending_prefix(text: str, markers: Collection[str]) -> int:
    """Length of the longest end of `text` with which a marker begins."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if marker.startswith(text[-size:]):
                longest = size
                break
    return longest
