"""What a way to write calls consists of."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..json_text import JsonTeller, load_json, read_json, tell_object
from ..reader import MalformedError, Reader, Reading


class Call(NamedTuple):
    """A call as it was written; `arguments` is JSON."""

    name: str
    arguments: dict[str, Any]


class Calls(Protocol):
    """Who is told of calls. All raise MalformedError where a call is none.

    What is told stays said: where the text goes wrong behind it the call ends there.
    """

    def tell(self, call: Call) -> None:
        """A call that is whole."""

    def begin(self, name: str) -> None:
        """A call, whose arguments come next."""

    def add(self, arguments: str) -> None:
        """A piece of these."""

    def end(self) -> None:
        """They are whole."""


@dataclass(frozen=True)
class Frame:
    """The text around a call's arguments, which are JSON; `{name}` stands for the function.

    Attributes:
        opening, closing: around all calls.
        separator: between two; None where there can be one only.
    """

    head: str
    tail: str
    separator: str | None
    opening: str = ""
    closing: str = ""

    def head_of(self, name: str) -> str:
        return self.head.replace("{name}", name)


class Syntax(ABC):
    """A way to write calls in text.

    Attributes:
        markers: texts with which calls begin, wherever they are.
        leading: texts with which they begin where nothing but space comes before.
        special: all texts of the syntax that may be special tokens.
        frame: how calls are written that a grammar is to make; None where their arguments are
            no JSON.
        tagged: each call begins with a marker of its own, that is part of the frame's head.
    """

    markers: tuple[str, ...] = ()
    leading: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    frame: Frame | None = None
    tagged = False

    @abstractmethod
    def read(self, reader: Reader, calls: Calls) -> Reading[None]:
        """Reads calls from where they begin, and tells them.

        Their arguments are told as they come. Raises MalformedError where there are none, or there
        is something else behind what was told.
        """

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"


def arguments_teller(calls: Calls, name: str) -> JsonTeller:
    """For arguments that are written in another way than JSON's: a call begins with their first
    piece.
    """
    has_begun = False

    def tell(piece: str) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            calls.begin(name)
        calls.add(piece)

    return JsonTeller(tell)


_ARGUMENTS = ("arguments", "parameters")


def tell_arguments(reader: Reader, calls: Calls, name: str) -> Reading[None]:
    """Reads the object that a call's arguments are."""
    if (yield from reader.peek()) != "{":
        raise MalformedError
    calls.begin(name)
    yield from tell_object(reader, calls.add)
    calls.end()


def tell_call(reader: Reader, calls: Calls) -> Reading[None]:
    """Reads `{"name": ..., "arguments": {...}}`.

    Where the name comes last, or the arguments are text, as in OpenAI's API, it is told as a whole.
    """
    given: dict[str, Any] = {}
    told = False

    def member() -> Reading[None]:
        nonlocal told
        if (yield from reader.peek()) != '"':
            raise MalformedError
        key = yield from read_json(reader)
        yield from reader.space()
        yield from reader.literal(":")
        yield from reader.space()
        name, first = given.get("name"), (yield from reader.peek())
        if key in _ARGUMENTS and isinstance(name, str) and first == "{" and not told:
            told = True
            yield from tell_arguments(reader, calls, name)
        else:
            given[key] = yield from read_json(reader)

    yield from reader.literal("{")
    yield from reader.items("}", member)
    if not told:
        calls.tell(_call_of(given))
    reader.keep()


def tell_calls(reader: Reader, calls: Calls) -> Reading[None]:
    """Reads one such object, or a list of them."""
    is_empty = True

    def item() -> Reading[None]:
        nonlocal is_empty
        is_empty = False
        yield from tell_call(reader, calls)

    if not (yield from reader.maybe("[")):
        yield from tell_call(reader, calls)
        return
    yield from reader.items("]", item)
    if is_empty:
        raise MalformedError


def _call_of(value: dict[str, Any]) -> Call:
    name = value.get("name")
    arguments = next((value[key] for key in _ARGUMENTS if key in value), None)
    if isinstance(arguments, str):
        arguments = load_json(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise MalformedError
    return Call(name, arguments)
