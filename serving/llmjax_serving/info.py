"""The routes that only tell: models, health, version, metrics."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from llmjax import __version__

from .accounts import KEY, check_access
from .errors import unavailable
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
    state = request.app[STATE]
    cards = [model_card(state)] if request[KEY].may_use(state.model_name) else []
    return web.json_response({"object": "list", "data": cards})


async def show_model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    check_model(request.match_info["model"], state.model_name)
    check_access(request[KEY], state.model_name)
    return web.json_response(model_card(state))


async def health(request: web.Request) -> web.Response:
    """200 while requests are taken and the engine makes progress, else 503 with the reason."""
    request.app[STATE].ready().check_health()
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """200 while a request that comes now would be taken, else 503 with the reason."""
    request.app[STATE].ready()
    engine = request.app[STATE].own_engine()
    engine.check_health()
    limit = engine.config.scheduler.max_queue_len
    if limit is not None and engine.stats().num_queued >= limit:
        raise unavailable(f"{limit} requests wait already (max_queue_len)", "queue_full")
    return web.json_response({"status": "ready"})


async def load(request: web.Request) -> web.Response:
    """How busy the server is, for load balancers; vLLM's `server_load` is requests at hand."""
    state = request.app[STATE]
    engine = state.own_engine()
    stats = engine.stats()
    await state.gather()
    return web.json_response(
        {
            "server_load": state.num_active,
            "requests_running": stats.num_running,
            "requests_waiting": stats.num_waiting,
            "requests_queued": stats.num_queued,
            "max_queue_len": engine.config.scheduler.max_queue_len,
            "pages_used": stats.pages_used,
            "pages_cached": stats.pages_cached,
            "pages_free": stats.pages_free,
        }
    )


async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": __version__})


async def metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    alias = state.config.metrics_alias
    await state.gather()
    if state.pooling is not None:
        text = exposed([state.pooling.metrics], alias)
    else:
        text = render(state.own_engine(), state.model_name, alias)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
