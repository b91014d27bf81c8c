"""The aiohttp application: every route, and what stands in front of them."""

from __future__ import annotations

from aiohttp import web

from . import chat, completions, dashboard, embeddings, info, messages, openapi, pages, tokens
from .auth import add_cors_headers, auth_middleware, cors_middleware
from .errors import error_middleware
from .state import STATE, ServerState, active_middleware


def make_app(state: ServerState) -> web.Application:
    config = state.config
    app = web.Application(
        client_max_size=config.max_body_bytes,
        middlewares=[
            error_middleware({"/v1/messages": messages.error_body}),
            cors_middleware(config.allowed_origins),
            auth_middleware(config.api_key, {"/health", *pages.PAGES}),
            active_middleware,
        ],
    )
    app[STATE] = state
    app[dashboard.SNAPSHOTS] = dashboard.Snapshots()
    app.on_response_prepare.append(add_cors_headers(config.allowed_origins))
    app.add_routes(
        [
            web.get("/health", info.health),
            web.get("/version", info.version),
            web.get("/metrics", info.metrics),
            *(web.get(path, pages.page) for path in pages.PAGES),
            web.get("/dashboard/state", dashboard.state),
            web.get("/openapi.json", openapi.openapi),
            web.get("/v1/models", info.list_models),
            web.get("/v1/models/{model:.+}", info.show_model),
            web.post("/v1/completions", completions.create_completion),
            web.post("/v1/chat/completions", chat.create_chat_completion),
            web.post("/v1/messages", messages.create_message),
            web.post("/v1/messages/count_tokens", messages.count_tokens),
            web.post("/v1/embeddings", embeddings.create_embedding),
            *(web.post(path, embeddings.create_score) for path in openapi.SCORE),
            *(web.post(path, embeddings.create_rerank) for path in openapi.RERANK),
            web.post("/tokenize", tokens.tokenize),
            web.post("/detokenize", tokens.detokenize),
        ]
    )
    return app
