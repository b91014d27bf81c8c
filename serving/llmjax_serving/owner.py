"""Whose things a request may see."""

from __future__ import annotations

from aiohttp import web


def owner_of(request: web.Request) -> str:
    """The name of the key that a request was sent with."""
    return request.get("owner") or ""
