"""The aiohttp application: every route, and what stands in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import web

from llmjax.errors import ConfigError

from . import (
    accounts,
    batches,
    chat,
    completions,
    dashboard,
    embeddings,
    files,
    info,
    messages,
    openapi,
    pages,
    responses,
    tokens,
    tracing,
)
from .auth import add_cors_headers, auth_middleware, cors_middleware
from .body_budget import BUDGET, BodyBudget
from .delivery import body_middleware, delivery_middleware
from .errors import error_middleware
from .keys import KeyRing
from .limits import Limiter
from .request_id import add_request_id, request_id_middleware
from .response_store import ResponseStore
from .state import STATE, ServerState, active_middleware
from .watch import watched

OPEN = frozenset({"/health", "/ready", *pages.PAGES})
"""What needs no key: it tells nothing but whether requests are taken."""


def make_app(state: ServerState) -> web.Application:
    """Raises ConfigError where the keys cannot be read, or spans cannot be sent."""
    config = state.config
    keys = KeyRing(config.api_key, config.api_key_file)
    budget = BodyBudget(config.max_body_bytes, config.max_total_body_bytes)
    app = web.Application(
        client_max_size=config.max_body_bytes,
        middlewares=[
            request_id_middleware,
            delivery_middleware(config.client_timeout),
            error_middleware({"/v1/messages": messages.error_body}),
            cors_middleware(config.allowed_origins),
            auth_middleware(keys, OPEN),
            active_middleware,
            accounts.account_middleware,
            body_middleware(config.client_timeout, budget),
        ],
    )
    app[STATE] = state
    app[BUDGET] = budget
    app[dashboard.SNAPSHOTS] = dashboard.Snapshots()
    app[accounts.LIMITER] = Limiter()
    if (spans := tracing.make_spans(config, state.model_name)) is not None:
        app[tracing.SPANS] = spans
        app.cleanup_ctx.append(tracing.export_spans)
    app.on_response_prepare.append(add_request_id)
    if config.files_dir is not None:
        keep_files(app, Path(config.files_dir))
    app[responses.STORE] = ResponseStore(config.max_stored_responses)
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
            web.post("/v1/messages", messages.create_message),
            web.post("/v1/messages/count_tokens", messages.count_tokens),
            web.post("/v1/embeddings", embeddings.create_embedding),
            web.post("/pooling", embeddings.create_pooling),
            *(web.post(path, embeddings.create_score) for path in openapi.SCORE),
            *(web.post(path, embeddings.create_rerank) for path in openapi.RERANK),
            web.post("/v1/responses", responses.create),
            web.get("/v1/responses/{response_id}", responses.retrieve),
            web.delete("/v1/responses/{response_id}", responses.delete),
            web.post("/v1/responses/{response_id}/cancel", responses.cancel),
            web.get("/v1/responses/{response_id}/input_items", responses.input_items),
            web.post("/v1/files", files.upload),
            web.get("/v1/files", files.list_files),
            web.get("/v1/files/{id}", files.show_file),
            web.get("/v1/files/{id}/content", files.file_content),
            web.delete("/v1/files/{id}", files.delete_file),
            web.post("/v1/batches", batches.create_batch),
            web.get("/v1/batches", batches.list_batches),
            web.get("/v1/batches/{id}", batches.show_batch),
            web.post("/v1/batches/{id}/cancel", batches.cancel_batch),
            web.post("/v1/chat/completions/render", tokens.render),
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


def keep_files(app: web.Application, path: Path) -> None:
    """Raises ConfigError where the folder cannot be written to."""
    try:
        app[files.FILES] = files.Folder(path / "files", "file")
        folder = files.Folder(path / "batches", "batch")
        app[batches.BATCHES] = batches.Batches(folder, app[files.FILES])
    except OSError as error:
        raise ConfigError(f"files_dir: {error}") from error
