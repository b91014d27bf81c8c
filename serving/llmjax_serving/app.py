"""The aiohttp application: every route, and what stands in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
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
from .config import ServerConfig
from .delivery import body_middleware, delivery_middleware
from .errors import error_middleware
from .frontends.forward import Forwarder, forwarding_middleware
from .keys import KeyRing
from .ledger import Tally
from .limits import Accounts, Limiter
from .request_id import add_request_id, request_id_middleware
from .response_store import ResponseStore
from .state import STATE, ServerState, active_middleware
from .watch import watched

OPEN = frozenset({"/health", "/ready", *pages.PAGES})
"""What needs no key: it tells nothing but whether requests are taken."""


@dataclass(frozen=True)
class Elsewhere:
    """What the app of a frontend has in the engine's process.

    Attributes:
        tally: takes what is used, until that process is told.
    """

    forwarder: Forwarder
    accounts: Accounts
    tally: Tally


def make_app(state: ServerState, elsewhere: Elsewhere | None = None) -> web.Application:
    """Everything in one app; that of a frontend hands on what is kept `elsewhere`.

    Raises:
        ConfigError: the keys cannot be read, or spans cannot be sent.
    """
    config = state.config
    keys = KeyRing(config.api_key, config.api_key_file)
    budget = BodyBudget(config.max_body_bytes, config.max_total_body_bytes)
    kept = kept_routes()
    of_frontends = []
    if elsewhere is not None:
        paths = frozenset(route.path for route in kept)
        of_frontends.append(forwarding_middleware(elsewhere.forwarder, paths))
    app = web.Application(
        client_max_size=config.max_body_bytes,
        middlewares=[
            request_id_middleware,
            delivery_middleware(config.client_timeout),
            error_middleware({"/v1/messages": messages.error_body}),
            cors_middleware(config.allowed_origins),
            auth_middleware(keys, OPEN),
            *of_frontends,
            active_middleware,
            accounts.account_middleware,
            body_middleware(config.client_timeout, budget),
        ],
    )
    app[STATE] = state
    app[BUDGET] = budget
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(add_cors_headers(config.allowed_origins))
    app.on_response_prepare.append(accounts.add_limit_headers)
    if (spans := tracing.make_spans(config, state.model_name)) is not None:
        app[tracing.SPANS] = spans
        app.cleanup_ctx.append(tracing.export_spans)
    if elsewhere is None:
        keep(app, config)
    else:
        app[accounts.LIMITER], app[accounts.TALLY] = elsewhere.accounts, elsewhere.tally
        app.cleanup_ctx.append(elsewhere.forwarder.running)
    if config.api_key_file is not None:
        app.cleanup_ctx.append(reloading(keys, config.api_key_file))
    app.add_routes([*kept, *routes()])
    return app


def keep(app: web.Application, config: ServerConfig) -> None:
    """Adds what is counted and stored: of it there is one, whatever the number of processes."""
    app[dashboard.SNAPSHOTS] = dashboard.Snapshots()
    app[accounts.LIMITER] = Limiter()
    if config.files_dir is not None:
        keep_files(app, Path(config.files_dir))
    app[responses.STORE] = ResponseStore(config.max_stored_responses)
    app.cleanup_ctx.append(accounts.keep_ledger)


def kept_routes() -> list[web.RouteDef]:
    """About what is kept, counted or computed in one place."""
    return [
        web.get("/health", info.health),
        web.get("/ready", info.ready),
        web.get("/ping", info.health),
        web.get("/load", info.load),
        web.get("/usage", accounts.show_usage),
        web.get("/metrics", info.metrics),
        web.get("/dashboard/state", dashboard.state),
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
    ]


def routes() -> list[web.RouteDef]:
    """What any process answers that has an engine to ask."""
    return [
        web.get("/version", info.version),
        *(web.get(path, pages.page) for path in pages.PAGES),
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
        web.post("/v1/chat/completions/render", tokens.render),
        web.post("/tokenize", tokens.tokenize),
        web.post("/detokenize", tokens.detokenize),
        web.get("/tokenizer_info", tokens.tokenizer_info),
    ]


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
