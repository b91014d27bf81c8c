"""What is too much of a grammar, seen before it is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ..checks import cut
from ..errors import InvalidRequestError

MAX_SOURCE = 1 << 20
"""Characters."""
MAX_DEPTH = 100
"""Of a schema's or a regex's nesting."""
MAX_VALUES = 20_000
"""Of `enum`s and choices together."""
MAX_COUNT = 1_000_000
"""Of `minItems`, `minLength` and the like: no context holds more."""
MAX_REPEATS = 100_000
"""Of a regex: the numbers of repetitions within each other, multiplied."""

_COUNTS = ("minItems", "minLength", "minProperties")
_REPEAT = re.compile(r"\{(\d+)(,(\d*))?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]")


def refuse(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {why}", param=param)


def check_source(source: str, param: str) -> None:
    if len(source) > MAX_SOURCE:
        raise refuse(param, f"{len(source)} characters, allowed: up to {MAX_SOURCE}")


def check_choice(choice: list[str], param: str) -> None:
    if len(choice) > MAX_VALUES:
        raise refuse(param, f"{len(choice)} values, allowed: up to {MAX_VALUES}")
    check_source("".join(choice), param)


def check_regex(regex: str, param: str) -> None:
    """Refuses repetitions of repetitions that come to too much.

    Raises:
        InvalidRequestError: names `param`.
    """
    check_source(regex, param)
    # Of each open group: the most that one of its parts is repeated.
    open_groups, last, at = [1], 1, 0
    while at < len(regex):
        char, end = regex[at], at + 1
        if char == "\\":
            last, end = 1, at + 2
        elif char == "[" and (match := _CLASS.match(regex, at)):
            last, end = 1, match.end()
        elif char == "(":
            open_groups.append(1)
            if len(open_groups) > MAX_DEPTH:
                raise refuse(param, f"groups within groups, allowed: up to {MAX_DEPTH}")
        elif char == ")" and len(open_groups) > 1:
            last = open_groups.pop()
        elif char == "{" and (match := _REPEAT.match(regex, at)):
            last, end = last * max(1, int(match[3] or match[1])), match.end()
        elif char not in "*+?":
            last = 1
        open_groups[-1] = max(open_groups[-1], last)
        if last > MAX_REPEATS:
            raise refuse(param, f"repeats {last} times, allowed: up to {MAX_REPEATS}")
        at = end


def check_schema(schema: Any, param: str) -> None:
    """Refuses a schema that is too large or deep, or that goes round in circles.

    Raises:
        InvalidRequestError: names `param`.
    """
    num_values = 0
    sound: set[str] = set()
    for key, value in _entries(schema, param, 0):
        if key in _COUNTS and isinstance(value, int | float) and value > MAX_COUNT:
            raise refuse(param, f"{key} is {value}, allowed: up to {MAX_COUNT}")
        if key == "enum" and isinstance(value, list):
            num_values += len(value)
        for regex in _regexes(key, value):
            check_regex(regex, param)
        if key == "$ref":
            _check_circle(schema, value, param, sound)
        if key == "$id" and isinstance(value, str) and value != schema.get("$id"):
            raise refuse(param, "$id below the root, which would change what references mean")
    if num_values > MAX_VALUES:
        raise refuse(param, f"{num_values} values of enums, allowed: up to {MAX_VALUES}")


def _regexes(key: str, value: Any) -> list[str]:
    if key == "patternProperties" and isinstance(value, dict):
        return list(value)
    return [value] if key == "pattern" and isinstance(value, str) else []


def _entries(value: Any, param: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Every key with its value, anywhere."""
    if depth > MAX_DEPTH:
        raise refuse(param, f"it is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        yield from value.items()
        value = value.values()
    if not isinstance(value, str):
        for part in value if hasattr(value, "__iter__") else ():
            yield from _entries(part, param, depth + 1)


def _check_circle(schema: Any, ref: Any, param: str, sound: set[str]) -> None:
    """A reference must come to something: not to a reference that comes back to it.

    Args:
        sound: those that do; more are added.
    """
    seen: dict[str, None] = {}
    while isinstance(ref, str) and ref.startswith("#") and ref not in sound:
        if ref in seen:
            names = [*seen, ref]
            circle = cut(" -> ".join(names[names.index(ref) :]))
            raise refuse(param, f"the references go round in a circle: {circle}")
        seen[ref] = None
        target = _resolve(schema, ref)
        ref = target.get("$ref") if isinstance(target, dict) else None
    sound.update(seen)


def _resolve(schema: Any, ref: str) -> Any:
    for part in ref.lstrip("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema
