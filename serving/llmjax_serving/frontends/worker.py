"""One frontend: reads requests, tokenises, streams answers. The engine is another process's.

The process that started it says what to serve, and when to end; signals are for that one.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import socket
from dataclasses import astuple, dataclass
from typing import Any

from aiohttp import web

from llmjax.errors import EngineDeadError

from ..app import Elsewhere, make_app
from ..cli.flags import log_bare, set_up_logging
from ..config import ServerConfig
from ..ledger import Tally
from ..listen import current_certificate, tls_context
from ..running import BACKLOG, LAST_WORDS_SECONDS, make_runner
from ..state import ServerState
from .forward import Forwarder
from .link import Link
from .remote import Description, RemoteAccounts, RemoteEngine, remote

logger = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
"""What the death of a frontend may lose of what it has counted."""


@dataclass(frozen=True)
class Setup:
    """What a frontend begins with; it travels pickled.

    Attributes:
        created: when the server was started, as all of them say it.
        private_path: of the socket at which the engine's process answers for all.
    """

    model_name: str
    config: ServerConfig
    created: int
    log_level: int
    private_path: str


class SharedListener(socket.socket):
    """A listening socket that several processes take connections from."""

    def listen(self, backlog: int = BACKLOG, /) -> None:
        """As many wait as for a process alone, whatever one of several thinks of its own."""
        super().listen(BACKLOG)


class Worker:
    """The life of a frontend.

    Args:
        listener: the socket that all frontends take connections from.
    """

    def __init__(self, listener: SharedListener):
        self._listener = listener
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[tuple[Setup, ServerState] | None] = loop.create_future()
        self._stop = asyncio.Event()
        self._tally = Tally()
        self._handlers: dict[str, Any] = {
            "setup": self._set_up,
            "serve": self._serve,
            "drain": self._drain,
            "report": self._report,
            "stop": self._stop.set,
        }
        self._state: ServerState | None = None
        self._link: Link | None = None

    async def run(self, sock: socket.socket) -> int:
        """Serves until it is told to stop, or nobody is there to tell it.

        Returns:
            The exit status.
        """
        self._link = link = await Link.over(sock, self._handlers, self._on_lost)
        if (begun := await self._begun) is None:
            return 1
        setup, state = begun
        elsewhere = Elsewhere(Forwarder(setup.private_path), RemoteAccounts(link), self._tally)
        runner = make_runner(make_app(state, elsewhere), setup.config)
        reporting = asyncio.ensure_future(self._keep_reporting())
        try:
            await runner.setup()
            tls = tls_context(setup.config)
            async with current_certificate(tls, setup.config):
                # Whoever finds connections waiting takes one, not all: so all processes get some.
                await web.SockSite(runner, self._listener, backlog=1, ssl_context=tls).start()
                await self._stop.wait()
                if state.active:
                    await asyncio.wait(state.active, timeout=LAST_WORDS_SECONDS)
        finally:
            reporting.cancel()
            await runner.cleanup()
            state.close()
            is_lost = link.is_lost
            link.tell("report", *self._report())
            link.close()
        return 1 if is_lost else 0

    def _set_up(self, pickled: bytes) -> None:
        setup: Setup = pickle.loads(pickled)
        set_up_logging(setup.log_level)
        if setup.config.access_log_format == "json":
            log_bare("llmjax_serving.access")
        self._state = ServerState(setup.model_name, setup.config, created=setup.created)
        self._begun.set_result((setup, self._state))

    def _serve(self, pickled: bytes) -> None:
        about: Description = pickle.loads(pickled)
        assert self._link is not None and self._state is not None
        engine = remote(self._link, about)
        self._handlers.update(engine.handlers)
        if isinstance(engine, RemoteEngine):
            self._state.engine = engine
        else:
            self._state.pooling = engine

    async def _drain(self) -> None:
        """Takes no new requests; comes back when there are none."""
        assert self._state is not None
        self._state.draining = True
        while self._state.active:
            await asyncio.wait(set(self._state.active))

    def _report(self) -> tuple[Any, ...]:
        """See `Guest.take_report`."""
        state = self._state
        counted = state.engine.metrics.tell() if state is not None and state.engine else []
        rows = [(row, astuple(used)) for row, used in self._tally.take().items()]
        return counted, rows, len(state.active) if state is not None else 0

    async def _keep_reporting(self) -> None:
        assert self._link is not None
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._link.tell("report", *self._report())

    def _on_lost(self) -> None:
        """The engine's process is gone: those who wait are told, and it is the end."""
        if self._state is None:
            self._begun.set_result(None)
        elif (engine := self._state.engine or self._state.pooling) is not None:
            engine.fail(EngineDeadError("the process that computes has ended"))  # type: ignore[union-attr]
        self._stop.set()


async def work(link: int, listener: int) -> int:
    """A frontend's life, by the numbers of the sockets that it was started with."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    return await Worker(SharedListener(fileno=listener)).run(socket.socket(fileno=link))
