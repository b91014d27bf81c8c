"""How the app is run, whichever process it is in."""

from __future__ import annotations

import logging

from aiohttp import web

from .access_log import ACCESS, AccessLogger, is_ours
from .config import ServerConfig

MAX_HEADERS = 100
MAX_HEADER_BYTES = 8190
"""Of the request line, and of each header."""
BACKLOG = 1024
"""Connections that wait to be taken."""

LAST_WORDS_SECONDS = 5.0
"""What handlers get, once the engine has stopped, to tell their clients so."""


def make_runner(
    app: web.Application, config: ServerConfig, *, logs_access: bool = True
) -> web.AppRunner:
    logging.getLogger("aiohttp.server").addFilter(is_ours)
    # A client that goes away cancels its handler, which aborts its request.
    return web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=LAST_WORDS_SECONDS,
        access_log=ACCESS if logs_access else None,
        access_log_class=AccessLogger,
        access_log_format=config.access_log_format,
        # Between the end of a request and the end of the next one's headers.
        keepalive_timeout=config.client_timeout,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
    )
