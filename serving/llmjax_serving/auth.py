"""API keys and cross-origin rules, both in front of every route."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from aiohttp import web

from .accounts import KEY
from .errors import ApiError, Handler
from .keys import ANONYMOUS, KeyRing


def auth_middleware(keys: KeyRing, open_paths: Collection[str]) -> Any:
    """Refuses (401) every request without a key, but for `open_paths` and preflights."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if keys.is_open or request.path in open_paths or request.method == "OPTIONS":
            request[KEY] = ANONYMOUS
            return await handler(request)
        key = keys.find(secret_of(request))
        if key is None:
            raise ApiError(
                401,
                "no valid API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        request[KEY] = key
        return await handler(request)

    return middleware


def secret_of(request: web.Request) -> str:
    """The key that a client sends as OpenAI's or as Anthropic's clients do; of none, ""."""
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return secret.strip()
    return request.headers.get("x-api-key", "")


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
            response.headers["Access-Control-Expose-Headers"] = "*"
            response.headers.add("Vary", "Origin")

    return add


def allowed_origin(request: web.Request, allowed_origins: Sequence[str]) -> str | None:
    origin = request.headers.get("Origin")
    if origin is None or "*" in allowed_origins:
        return origin and "*"
    return origin if origin in allowed_origins else None
