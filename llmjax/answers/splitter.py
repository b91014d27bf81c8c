"""What splits an answer, as it comes, into reasoning and what comes after it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .reader import Reader, Reading


class Splitter(ABC):
    """Gives out what is new of both with each piece of text."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._reasoning, self._rest = "", ""
        self._reading = self._read()

    def push(self, text: str) -> tuple[str, str]:
        """New reasoning, and new text after it."""
        self._reader.text += text
        return self._go_on()

    def finish(self) -> tuple[str, str]:
        self._reader.ended = True
        return self._go_on()

    def _go_on(self) -> tuple[str, str]:
        next(self._reading, None)
        news = self._reasoning, self._rest
        self._reasoning = self._rest = ""
        return news

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Puts what it reads into `_reasoning` and `_rest`."""
