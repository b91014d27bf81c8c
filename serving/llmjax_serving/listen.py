"""Where a server listens: a port or a Unix socket, with or without TLS."""

from __future__ import annotations

import logging
import os
import resource
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial

from llmjax.errors import ConfigError

from .config import ServerConfig
from .watch import watched

logger = logging.getLogger(__name__)

MOST_FILES = 65_536


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises ConfigError where the address cannot be had."""
    with ExitStack() as on_failure:
        try:
            if config.uds is not None:
                family, kind, proto = socket.AF_UNIX, socket.SOCK_STREAM, 0
                address = remove_stale(config.uds)
            else:
                family, kind, proto, _, address = socket.getaddrinfo(  # type: ignore[assignment]
                    config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )[0]
            sock = on_failure.enter_context(socket.socket(family, kind, proto))
            if config.uds is None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except (OSError, OverflowError) as error:
            where = config.uds or f"{config.host} port {config.port}"
            raise ConfigError(f"cannot listen on {where}: {error}") from error
        on_failure.pop_all()
    return sock


def raise_file_limit() -> None:
    """Lets the process have as many connections open as it may; the default is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def remove_stale(path: str) -> str:
    """Makes way at `path` for a socket where there is one that nobody listens on.

    Raises:
        OSError: somebody does, or it is something else.
    """
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError("there is a file, which is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
    except FileNotFoundError:
        return path
    except ConnectionRefusedError:
        os.unlink(path)
        return path
    raise OSError("another server listens there: address already in use")


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS with the certificate that is given. Raises ConfigError where it is of no use."""
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(context, config)
    return context


def load_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    files = config.ssl_certfile, config.ssl_keyfile
    try:
        # An encrypted key would otherwise ask at the terminal for its password.
        context.load_cert_chain(*files, password=lambda: "")  # type: ignore[arg-type]
    except OSError as error:
        names = " and ".join(name for name in files if name is not None)
        raise ConfigError(f"TLS cannot use {names}: {error}") from error


def reload_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """For connections to come. Where the files are bad the certificate stays as it was."""
    try:
        # What fails halfway would leave the context with half of each.
        tls_context(config)
        load_certificate(context, config)
    except ConfigError as error:
        logger.error("the certificate stays as it was: %s", error)
    else:
        logger.info("the certificate was read again")


@asynccontextmanager
async def current_certificate(
    context: ssl.SSLContext | None, config: ServerConfig
) -> AsyncIterator[None]:
    """Files of the certificate that change meanwhile are read again."""
    files = [name for name in (config.ssl_certfile, config.ssl_keyfile) if name is not None]
    if context is None:
        yield
        return
    async with watched(files, partial(reload_certificate, context, config)):
        yield


def url(sock: socket.socket, config: ServerConfig) -> str:
    """Where a client on this machine reaches the socket."""
    scheme = "http" if config.ssl_certfile is None else "https"
    if config.uds is not None:
        return f"{scheme}://localhost"
    host, port = config.host, sock.getsockname()[1]
    if host in ("", "0.0.0.0", "::"):
        host = "localhost"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
