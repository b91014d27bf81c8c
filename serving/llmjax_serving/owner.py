"""Whose things a request may see."""

from __future__ import annotations

from aiohttp import web

from .accounts import KEY


def owner_of(request: web.Request) -> str:
    """The name of the key that a request was sent with; "anonymous" where none are asked for."""
    return request[KEY].name
