"""What a way to write calls consists of."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..reader import MalformedError, Reader, Reading, load_json


class Call(NamedTuple):
    """A call as it was written; `arguments` is JSON."""

    name: str
    arguments: dict[str, Any]


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
    def read(self, reader: Reader) -> Reading[list[Call]]:
        """Reads calls from where they begin. Raises MalformedError where there are none."""

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"


def call_of(value: Any, keys: tuple[str, ...] = ("arguments", "parameters")) -> Call:
    """A call from `{"name": ..., "arguments": {...}}`. Raises MalformedError where it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise MalformedError
    for key in keys:
        if key in value:
            return Call(value["name"], arguments_of(value[key]))
    raise MalformedError


def calls_of(value: Any) -> list[Call]:
    """Calls from one object, or from a list of them."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise MalformedError
    return [call_of(one) for one in values]


def arguments_of(value: Any) -> dict[str, Any]:
    """Some models write the object as text, as OpenAI's API does."""
    if isinstance(value, str):
        value = load_json(value)
    if not isinstance(value, dict):
        raise MalformedError
    return value
