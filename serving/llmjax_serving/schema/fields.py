"""Typed reading of JSON objects from field tables.

A table maps a field's name to a `Field`; a second one maps the fields that mean nothing here
to the values that are harmless. Everything else is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from llmjax.checks import MOST_SHOWN, cut
from llmjax.errors import InvalidRequestError

_ENCODER = json.JSONEncoder(ensure_ascii=False)

Parse = Callable[[Any, str], Any]
"""(JSON value, path of the field) -> typed value; raises InvalidRequestError."""
P = TypeVar("P", bound=Parse)


class Field(NamedTuple):
    """How a field is read; null and absence both mean `default`."""

    parse: Parse
    default: Any = None
    required: bool = False


def described(schema: Mapping[str, Any]) -> Callable[[P], P]:
    """Says what a parser takes, as a JSON schema, for the API's own description."""

    def describe(parse: P) -> P:
        parse.__dict__["schema"] = schema
        return parse

    return describe


def bounded(parse: Parse, **bounds: float) -> Parse:
    """A parser whose description has the bounds that are checked later, with the others."""

    @described(schema_of(parse) | bounds)
    def same(value: Any, path: str) -> Any:
        return parse(value, path)

    return same


def schema_of(parse: Parse) -> dict[str, Any]:
    """What a parser takes; what is not described is anything."""
    return dict(getattr(parse, "schema", {}))


def object_schema(
    table: Mapping[str, Field], no_ops: Mapping[str, Parse] | None = None
) -> dict[str, Any]:
    """What `read` takes."""
    properties = {name: _or_null(schema_of(field.parse)) for name, field in table.items()}
    for name, field in table.items():
        if field.required:
            properties[name] = schema_of(field.parse)
        elif isinstance(field.default, bool | int | float | str) and field.default != "":
            properties[name]["default"] = field.default
    properties |= {name: _or_null(schema_of(parse)) for name, parse in (no_ops or {}).items()}
    required = [name for name, field in table.items() if field.required]
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"required": required} if required else {})


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    if not schema or schema.get("type") == "null":
        return schema
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return schema | {"type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


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


def renamed(
    error: InvalidRequestError, names: Iterable[tuple[re.Pattern[str], str]]
) -> InvalidRequestError:
    """A refusal of what another API calls so, by the (pattern, name)s of this one."""
    message, param = str(error), error.param
    for pattern, name in names:
        message = pattern.sub(name, message)
        param = param and pattern.sub(name, param)
    return InvalidRequestError(message, param=param, code=error.code)


@described({"type": "boolean"})
def boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise refuse(path, value, "true or false")
    return value


@described({"type": "string"})
def text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise refuse(path, value, "a string")
    return value


@described({"type": "object"})
def mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(path, value, "an object")
    return value


@described({})
def anything(value: Any, path: str) -> Any:
    return value


@described({"type": "array"})
def array(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise refuse(path, value, "a list")
    return value


def is_integer(value: Any) -> bool:
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


@described({"type": "number"})
def number(value: Any, path: str) -> float:
    # Compared, as math.isfinite fails on an integer beyond any float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise refuse(path, value, "a number")
    return value


def integer(least: int | None = None, most: int | None = None) -> Parse:
    limits = [f"from {least}"] if least is not None else []
    limits += [f"to {most}"] if most is not None else []
    allowed = " ".join(["an integer", *limits])
    bounds = {"minimum": least, "maximum": most}

    @described({"type": "integer"} | {k: v for k, v in bounds.items() if v is not None})
    def parse(value: Any, path: str) -> int:
        ok = is_integer(value)
        ok = ok and (least is None or value >= least) and (most is None or value <= most)
        if not ok:
            raise refuse(path, value, allowed)
        return int(value)

    return parse


def list_of(parse_item: Parse) -> Parse:
    @described({"type": "array", "items": schema_of(parse_item)})
    def parse(value: Any, path: str) -> list[Any]:
        return [parse_item(item, f"{path}[{i}]") for i, item in enumerate(array(value, path))]

    return parse


def one_or_list_of(parse_item: Parse) -> Parse:
    many = list_of(parse_item)

    @described({"anyOf": [schema_of(parse_item), schema_of(many)]})
    def parse(value: Any, path: str) -> list[Any]:
        return many(value, path) if isinstance(value, list) else [parse_item(value, path)]

    return parse


def only(*values: Any) -> Parse:
    """Accepts the listed values alone: for fields whose no-op setting clients send."""
    allowed = ", ".join(shown(v) for v in values) or "null"

    @described({"enum": list(values)} if values else {"type": "null"})
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
    values = {}
    for name, field in table.items():
        if field.required and body.get(name) is None:
            raise InvalidRequestError(f"{path}{name} is required", param=path + name)
        values[name] = field.default
    for name, value in body.items():
        if value is None:
            continue
        if (own := table.get(name)) is not None:
            values[name] = own.parse(value, path + name)
        else:
            no_ops[name](value, path + name)
    return values
