"""The routes that only tell: models, health, version, metrics."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from llmjax import __version__

from .formatter import JsonObject
from .metrics import exposed, render
from .schema.sampling import check_model
from .state import STATE, ServerState


def model_card(state: ServerState) -> JsonObject:
    engine = state.ready()
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "llmjax",
        "root": engine.config.model.model,
        "parent": None,
        "max_model_len": engine.max_model_len,
    }


async def list_models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [model_card(request.app[STATE])]})


async def show_model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    check_model(request.match_info["model"], state.model_name)
    return web.json_response(model_card(state))


async def health(request: web.Request) -> web.Response:
    """200 while requests are taken and the engine makes progress, else 503 with the reason."""
    request.app[STATE].ready().check_health()
    return web.json_response({"status": "ok"})


async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": __version__})


async def metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    alias = state.config.metrics_alias
    if state.pooling is not None:
        text = exposed([state.pooling.metrics.registry], alias)
    else:
        text = render(state.loaded_engine(), state.model_name, alias)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
