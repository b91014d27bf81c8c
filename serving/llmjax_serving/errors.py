"""OpenAI error bodies: one place decides what each failure looks like to a client."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from llmjax.errors import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    QueueTimeoutError,
    RequestFailedError,
    RequestTimeoutError,
    ShutdownError,
    StructuredOutputError,
)

from . import request_id

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5
"""Retry-After while the server loads, drains or has stopped."""


class ApiError(Exception):
    """A failure as the client sees it: an HTTP status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self),
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> web.Response:
        return web.json_response(self.body(), status=self.status, headers=self.headers)


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_SECONDS)})


def api_error(error: Exception) -> ApiError:
    """What a client is told of `error`; logs what only the operator should see."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            status = 404 if error.code == "model_not_found" else 400
            return ApiError(status, str(error), param=error.param, code=error.code)
        case StructuredOutputError():
            return ApiError(400, str(error), code="structured_output_failed")
        case QueueFullError():
            retry = {"Retry-After": str(error.retry_after)}
            return ApiError(429, str(error), code="queue_full", headers=retry)
        case QueueTimeoutError():
            retry = {"Retry-After": str(error.retry_after)}
            return ApiError(503, str(error), code="queue_timeout", headers=retry)
        case RequestTimeoutError():
            return ApiError(504, str(error), code="timeout")
        case RequestFailedError():
            # The cause is the operator's business, and is in the log.
            return ApiError(500, "the engine failed to compute this request", code="request_failed")
        case ShutdownError():
            return unavailable(str(error), "shutting_down")
        case EngineDeadError():
            return unavailable(str(error), "engine_dead")
        case web.HTTPException():
            return http_error(error)
        case _:
            logger.error("request %s failed", request_id.current.get(), exc_info=error)
            return ApiError(500, f"internal error ({type(error).__name__}); see the server's log")


def http_error(error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals: no such route, wrong method, body too large."""
    match error:
        case web.HTTPRequestEntityTooLarge():
            message = f"the request is too large: {error.text}"
            return ApiError(413, message, code="request_too_large")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{error.method} is not allowed here, allowed: {allowed}"
            return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
        case web.HTTPNotFound():
            return ApiError(404, "there is no such URL", code="not_found")
        case _:
            return ApiError(error.status, error.reason)


def error_middleware(bodies: Mapping[str, Callable[[ApiError], dict[str, Any]]]) -> Any:
    """Answers with the failure; `bodies`: the shape of it below some paths."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Exception as error:
            failed = api_error(error)
            for path, body in bodies.items():
                if request.path.startswith(path):
                    told = body(failed)
                    return web.json_response(told, status=failed.status, headers=failed.headers)
            return failed.response()

    return middleware
