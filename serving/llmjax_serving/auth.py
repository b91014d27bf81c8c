"""API keys and cross-origin rules, both in front of every route."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Sequence
from typing import Any

from aiohttp import web

from .errors import ApiError, Handler


def auth_middleware(api_key: str | None, open_paths: Collection[str]) -> Any:
    """Refuses (401) every request without the key, but for `open_paths` and preflights."""
    expected = hashlib.sha256(api_key.encode()).digest() if api_key else None

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_open = request.path in open_paths or request.method == "OPTIONS"
        if expected is not None and not is_open:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            # Digests: compare_digest leaks the length of what it compares, and takes no
            # text outside ASCII.
            given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
            if not hmac.compare_digest(given, expected) or scheme.lower() != "bearer":
                raise ApiError(
                    401,
                    "no valid API key; send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        return await handler(request)

    return middleware


def cors_middleware(allowed_origins: Sequence[str]) -> Any:
    """Answers preflights; `add_cors_headers` does the rest."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "OPTIONS":
            return await handler(request)
        headers = {}
        if allowed_origin(request, allowed_origins) is not None:
            headers = {
                "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
                "Access-Control-Allow-Headers": request.headers.get(
                    "Access-Control-Request-Headers", "*"
                ),
                "Access-Control-Max-Age": "600",
            }
        return web.Response(status=204, headers=headers)

    return middleware


def add_cors_headers(allowed_origins: Sequence[str]) -> Any:
    """A signal for `on_response_prepare`: errors and streams need the header too."""

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        origin = allowed_origin(request, allowed_origins)
        if origin is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers.add("Vary", "Origin")

    return add


def allowed_origin(request: web.Request, allowed_origins: Sequence[str]) -> str | None:
    origin = request.headers.get("Origin")
    if origin is None or "*" in allowed_origins:
        return origin and "*"
    return origin if origin in allowed_origins else None
