"""Queries of URLs, and lists in pages: `limit`, `order`, `after`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from llmjax.checks import cut
from llmjax.errors import InvalidRequestError

from .formatter import JsonObject
from .schema.fields import Field, Parse, read, refuse, text


def query(
    request: web.Request,
    table: Mapping[str, Field],
    no_ops: Mapping[str, Parse] | None = None,
    *,
    many: Mapping[str, Parse] | None = None,
) -> dict[str, Any]:
    """Reads the query by `table`, as `fields.read` does a body.

    Args:
        many: those of `no_ops` that may come several times, also as `name[]`.

    Raises:
        InvalidRequestError: there is something else, or twice the same.
    """
    given: dict[str, Any] = {}
    for written, value in request.query.items():
        name = written.removesuffix("[]")
        if many is not None and name in many:
            many[name](value, name)
            continue
        if written in given:
            raise InvalidRequestError(f"{cut(written)} is given twice", param=cut(written))
        given[written] = value
    return read(given, table, no_ops or {})


def limit(most: int) -> Parse:
    allowed = f"an integer from 1 up to {most}"

    def parse(value: Any, path: str) -> int:
        is_short = value.isascii() and value.isdecimal() and len(value) <= len(str(most))
        if not (is_short and 1 <= int(value) <= most):
            raise refuse(path, value, allowed)
        return int(value)

    return parse


def order(value: Any, path: str) -> str:
    if value not in ("asc", "desc"):
        raise refuse(path, value, "asc, desc")
    return value


def fields(default: int, most: int) -> dict[str, Field]:
    """Of a page: how many there are in one where nothing is said, and at most."""
    return {
        "limit": Field(limit(most), default),
        "order": Field(order, "desc"),
        "after": Field(text),
    }


def page(newest_first: Sequence[JsonObject], asked: Mapping[str, Any]) -> JsonObject:
    """What was asked for of a list, by a query that was read with `fields`.

    Raises:
        InvalidRequestError: nothing in it has the id in `after`.
    """
    items = newest_first if asked["order"] == "desc" else newest_first[::-1]
    if asked["after"] is not None:
        ids = [item["id"] for item in items]
        if asked["after"] not in ids:
            raise refuse("after", asked["after"], "the id of something in the list")
        items = items[ids.index(asked["after"]) + 1 :]
    shown = items[: asked["limit"]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > len(shown),
    }
