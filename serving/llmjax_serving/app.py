"""The aiohttp application: every route, and what stands in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from aiohttp import web

from . import accounts, chat, completions, dashboard, info, openapi, pages, tokens
from .auth import add_cors_headers, auth_middleware, cors_middleware
from .delivery import body_middleware, delivery_middleware
from .errors import error_middleware
from .keys import KeyRing
from .limits import Limiter
from .request_id import add_request_id, request_id_middleware
from .state import STATE, ServerState, active_middleware
from .watch import watched

OPEN = frozenset({"/health", "/ready", *pages.PAGES})
"""What needs no key: it tells nothing but whether requests are taken."""


def make_app(state: ServerState) -> web.Application:
    """Raises ConfigError where the keys cannot be read."""
    config = state.config
    keys = KeyRing(config.api_key, config.api_key_file)
    app = web.Application(
        client_max_size=config.max_body_bytes,
        middlewares=[
            request_id_middleware,
            delivery_middleware(config.client_timeout),
            error_middleware,
            cors_middleware(config.allowed_origins),
            auth_middleware(keys, OPEN),
            active_middleware,
            accounts.account_middleware,
            body_middleware(config.client_timeout),
        ],
    )
    app[STATE] = state
    app[dashboard.SNAPSHOTS] = dashboard.Snapshots()
    app[accounts.LIMITER] = Limiter()
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(add_cors_headers(config.allowed_origins))
    app.on_response_prepare.append(accounts.add_limit_headers)
    app.cleanup_ctx.append(accounts.keep_ledger)
    if config.api_key_file is not None:
        app.cleanup_ctx.append(reloading(keys, config.api_key_file))
    app.add_routes(
        [
            web.get("/health", info.health),
            web.get("/ready", info.ready),
            web.get("/ping", info.health),
            web.get("/load", info.load),
            web.get("/usage", accounts.show_usage),
            web.get("/version", info.version),
            web.get("/metrics", info.metrics),
            *(web.get(path, pages.page) for path in pages.PAGES),
            web.get("/dashboard/state", dashboard.state),
            web.get("/openapi.json", openapi.openapi),
            web.get("/v1/models", info.list_models),
            web.get("/v1/models/{model:.+}", info.show_model),
            web.post("/v1/completions", completions.create_completion),
            web.post("/v1/chat/completions", chat.create_chat_completion),
            web.post("/tokenize", tokens.tokenize),
            web.post("/detokenize", tokens.detokenize),
        ]
    )
    return app


def reloading(keys: KeyRing, path: str) -> Callable[[web.Application], AsyncIterator[None]]:
    async def context(app: web.Application) -> AsyncIterator[None]:
        async with watched([path], keys.reload):
            yield

    return context
