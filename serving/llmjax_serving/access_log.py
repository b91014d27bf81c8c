"""The log's line about each request."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http_exceptions import HttpProcessingError

from .accounts import KEY
from .request_id import REQUEST_ID

ACCESS = logging.getLogger("llmjax_serving.access")

QUIET_PATHS = frozenset({"/health", "/ready", "/ping", "/load", "/metrics", "/dashboard/state"})
"""Asked for every few seconds by machines; logging that hides the rest."""


def is_ours(record: logging.LogRecord) -> bool:
    """Leaves out what is no HTTP, which anyone can send: a line of the access log is enough."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


class AccessLogger(AbstractAccessLogger):
    """A line for each request, as text or, where the format is "json", as an object."""

    @property
    def enabled(self) -> bool:
        return self.logger.isEnabledFor(logging.INFO)

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if request.path in QUIET_PATHS:
            return
        key = request.get(KEY)
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "remote": request.remote,
            "method": request.method,
            "path": request.path_qs,
            "status": response.status,
            "seconds": round(time, 3),
            "bytes": response.body_length,
            "key": key.name if key is not None else None,
            "request_id": request.get(REQUEST_ID),
        }
        if self.log_format == "json":
            self.logger.info(json.dumps(line))
        else:
            text = "%(remote)s %(method)s %(path)s %(status)d %(seconds).3f s, key %(key)s"
            self.logger.info(f"{text}, request %(request_id)s", line)
