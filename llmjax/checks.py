"""What users are told of the values they give. No jax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .errors import InvalidRequestError

MOST_SHOWN = 80
"""Characters of a value that a message quotes."""

WORDS = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    bool: ("True or False", "booleans"),
    NoneType: ("None", "None"),
}
"""What a type is called, alone and as many."""


def cut(text: str) -> str:
    """`text`, short enough to quote in a message."""
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."


def shown(value: object) -> str:
    """`value` as Python writes it, short enough for a message."""
    try:
        return cut(repr(value))
    except Exception:  # an integer of thousands of digits, or a repr that is broken
        return f"<{type(value).__name__}>"


def require(ok: bool, param: str, value: object, allowed: str) -> None:
    """Raises InvalidRequestError, which tells what is allowed, where a value is not."""
    if not ok:
        raise InvalidRequestError(f"{param} is {shown(value)}, allowed: {allowed}", param=param)


def type_errors(instance: Any) -> Iterator[tuple[str, str]]:
    """(field, what is wrong) of each field of a dataclass whose value is not of its type."""
    values = vars(instance)
    for name, hint, plain in _hints(instance.__class__):
        value = values[name]
        # Every request is checked: what is as it should be is seen to be so in no time.
        if type(value) not in plain and not _matches(value, hint):
            yield name, f"{name} is {shown(value)}, allowed: {_described(hint)}"


@cache
def _hints(cls: type) -> list[tuple[str, Any, frozenset[type]]]:
    """Name and type of each field, and the types that its values may have as they are."""
    hints = get_type_hints(cls)
    return [(field.name, hints[field.name], _plain(hints[field.name])) for field in fields(cls)]


def _plain(hint: Any) -> frozenset[type]:
    """Types whose every value is of a type."""
    if get_origin(hint) in (UnionType, Union):
        return frozenset().union(*map(_plain, get_args(hint)))
    if get_origin(hint) is not None or not isinstance(hint, type):
        return frozenset()
    return frozenset({int, float} if hint is float else {hint})


@cache
def _taken_apart(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


def _matches(value: Any, hint: Any) -> bool:
    """Whether `value` is of a type; lists and tuples stand for each other, integers for floats."""
    origin, args = _taken_apart(hint)
    if origin in (UnionType, Union):
        return any(_matches(value, arg) for arg in args)
    if origin in (tuple, list):
        return isinstance(value, tuple | list) and all(_matches(item, args[0]) for item in value)
    if origin is dict:
        key, item = args
        return isinstance(value, dict) and all(
            _matches(k, key) and _matches(v, item) for k, v in value.items()
        )
    if origin is Literal:
        return value in args
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _described(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        # A tuple and a list of the same are one thing to a reader.
        *most, last = dict.fromkeys(map(_described, args))
        return f"{', '.join(most)} or {last}" if most else last
    if origin in (tuple, list):
        return f"a list of {WORDS[args[0]][1]}" if args[0] in WORDS else "a list"
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is dict:
        return "a dict from {} to {}".format(*(WORDS[arg][1] for arg in args))
    return WORDS[hint][0] if hint in WORDS else f"a {hint.__name__}"
