"""Typed reading of JSON objects from field tables.

A table maps a field's name to a `Field`; a second one maps the fields that mean nothing here
to the values that are harmless. Everything else is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llmjax.checks import MOST_SHOWN, cut
from llmjax.errors import InvalidRequestError

_ENCODER = json.JSONEncoder(ensure_ascii=False)

Parse = Callable[[Any, str], Any]
"""(JSON value, path of the field) -> typed value; raises InvalidRequestError."""


class Field(NamedTuple):
    """How a field is read; null and absence both mean `default`."""

    parse: Parse
    default: Any = None
    required: bool = False


def shown(value: object) -> str:
    """`value` as JSON, short enough for a message; of what is large or deep, the beginning."""
    text = ""
    for piece in _ENCODER.iterencode(value):
        text += piece
        if len(text) > MOST_SHOWN:
            break
    return cut(text)


def refuse(path: str, value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path} is {shown(value)}, allowed: {allowed}", param=path)


def boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise refuse(path, value, "true or false")
    return value


def text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise refuse(path, value, "a string")
    return value


def mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(path, value, "an object")
    return value


def array(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise refuse(path, value, "a list")
    return value


def is_integer(value: Any) -> bool:
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


def number(value: Any, path: str) -> float:
    # Compared, as math.isfinite fails on an integer beyond any float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise refuse(path, value, "a number")
    return value


def integer(least: int | None = None, most: int | None = None) -> Parse:
    limits = [f"from {least}"] if least is not None else []
    limits += [f"up to {most}"] if most is not None else []
    allowed = " ".join(["an integer", *limits])

    def parse(value: Any, path: str) -> int:
        ok = is_integer(value)
        ok = ok and (least is None or value >= least) and (most is None or value <= most)
        if not ok:
            raise refuse(path, value, allowed)
        return int(value)

    return parse


def list_of(parse_item: Parse) -> Parse:
    def parse(value: Any, path: str) -> list[Any]:
        return [parse_item(item, f"{path}[{i}]") for i, item in enumerate(array(value, path))]

    return parse


def one_or_list_of(parse_item: Parse) -> Parse:
    many = list_of(parse_item)

    def parse(value: Any, path: str) -> list[Any]:
        return many(value, path) if isinstance(value, list) else [parse_item(value, path)]

    return parse


def only(*values: Any) -> Parse:
    """Accepts the listed values alone: for fields whose no-op setting clients send."""
    allowed = ", ".join(shown(v) for v in values) or "null"

    def parse(value: Any, path: str) -> Any:
        same = (v == value and isinstance(v, bool) == isinstance(value, bool) for v in values)
        if not any(same):
            raise InvalidRequestError(
                f"{path} is not supported with the value {shown(value)}; "
                f"leave it out (or send {allowed})",
                param=path,
            )
        return value

    return parse


def read(
    body: Mapping[str, Any],
    table: Mapping[str, Field],
    no_ops: Mapping[str, Parse],
    path: str = "",
) -> dict[str, Any]:
    """Reads `body` by `table`; the result has every field of the table.

    Args:
        no_ops: fields that change nothing, with the values they may have.
        path: prefix of the names in messages, for objects inside the body.

    Raises:
        InvalidRequestError: a field is unknown, missing, or has a value it cannot have.
    """
    unknown = [name for name in body if name not in table and name not in no_ops]
    if unknown:
        names = ", ".join(cut(path + name) for name in unknown[:8])
        raise InvalidRequestError(f"unknown field: {names}", param=cut(path + unknown[0]))
    for name, parse in no_ops.items():
        if body.get(name) is not None:
            parse(body[name], path + name)
    values = {}
    for name, field in table.items():
        value = body.get(name)
        if value is None and field.required:
            raise InvalidRequestError(f"{path}{name} is required", param=path + name)
        values[name] = field.default if value is None else field.parse(value, path + name)
    return values
