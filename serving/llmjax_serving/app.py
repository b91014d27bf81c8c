"""The aiohttp application: every route, and what stands in front of them."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from llmjax.errors import ConfigError

from . import (
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
)
from .auth import add_cors_headers, auth_middleware, cors_middleware
from .errors import error_middleware
from .response_store import ResponseStore
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
    if config.files_dir is not None:
        keep_files(app, Path(config.files_dir))
    app[responses.STORE] = ResponseStore(config.max_stored_responses)
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


def keep_files(app: web.Application, path: Path) -> None:
    """Raises ConfigError where the folder cannot be written to."""
    try:
        app[files.FILES] = files.Folder(path / "files", "file")
        folder = files.Folder(path / "batches", "batch")
        app[batches.BATCHES] = batches.Batches(folder, app[files.FILES])
    except OSError as error:
        raise ConfigError(f"files_dir: {error}") from error
