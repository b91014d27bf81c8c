"""Starts the frontends, knows how they are, and starts another where one has died."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from aiohttp import web

from llmjax.errors import LlmjaxError

from ..running import BACKLOG, LAST_WORDS_SECONDS
from .guest import Guest
from .link import Link
from .remote import Description
from .worker import Setup

if TYPE_CHECKING:
    from llmjax.engine.async_engine import AsyncEngine
    from llmjax.engine.pooling import PoolingEngine

logger = logging.getLogger(__name__)

MOST_DEATHS, DEATHS_SECONDS = 5, 60.0
"""So many frontends that die within that time are no accident: the server ends."""
REPORT_SECONDS = 1.0
"""A frontend that has not told for so long what it has counted is left out of an answer."""


class _Frontend:
    """A process, and the guest that stands for it here."""

    link: Link

    def __init__(self, process: asyncio.subprocess.Process, guest: Guest):
        self.process, self.guest = process, guest


class Frontends:
    """The frontends of a server.

    Args:
        app: keeps what is kept for all.
        sock: bound; they take connections from it.
        on_failure: called where it makes no sense to go on.
    """

    def __init__(
        self,
        app: web.Application,
        sock: socket.socket,
        setup: Setup,
        on_failure: Callable[[], None],
    ):
        self._app, self._sock, self._setup, self._on_failure = app, sock, setup, on_failure
        self._engine: AsyncEngine | PoolingEngine | None = None
        self._description = b""
        self._names = map(str, count())
        self._frontends: set[_Frontend] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._is_ending = False

    async def start(self) -> None:
        # From here on clients can connect; they wait until a frontend takes them.
        self._sock.listen(BACKLOG)
        for _ in range(self._setup.config.api_server_count):
            await self._start_one()

    @property
    def num_active(self) -> int:
        """Requests that they have at hand, by their last reports."""
        return sum(one.guest.num_active for one in self._frontends)

    def serve(self, engine: AsyncEngine | PoolingEngine) -> None:
        """Has them send their requests to it from now on."""
        from llmjax.engine.async_engine import AsyncEngine

        self._engine = engine
        if isinstance(engine, AsyncEngine):
            about = Description.of(engine)
        else:
            about = Description.of_pooling(engine)
        self._description = pickle.dumps(about)
        for one in self._frontends:
            self._introduce(one)

    async def gather(self) -> None:
        """Brings what they have counted up to date; one that does not tell is left out."""
        await asyncio.gather(*map(self._ask, list(self._frontends)))

    async def drain(self, timeout: float) -> None:
        """They take no new requests; waits until they have none, `timeout` seconds at most."""
        tasks = [asyncio.ensure_future(self._drained(one)) for one in self._frontends]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout)
            for task in late:
                task.cancel()

    async def stop(self) -> None:
        """Ends them, once they have told their clients how it ended."""
        self._is_ending = True
        for task in self._starting:
            task.cancel()
        ending = list(self._frontends)
        for one in ending:
            one.link.tell("stop")
        await asyncio.gather(*(self._end(one.process) for one in ending))

    async def _start_one(self) -> None:
        ours, theirs = socket.socketpair()
        sock = self._sock.fileno()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", __package__, str(theirs.fileno()), str(sock)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), sock),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        one = _Frontend(process, Guest(next(self._names), self._app, partial(_kill, process)))
        try:
            link = await Link.over(ours, one.guest.handlers, lambda: self._on_lost(one))
        except BaseException:
            _kill(process)
            raise
        one.link = one.guest.link = link
        link.tell("setup", pickle.dumps(self._setup))
        if link.is_lost:
            return  # and another one is started already
        self._frontends.add(one)
        if self._engine is not None:
            self._introduce(one)

    def _introduce(self, one: _Frontend) -> None:
        assert self._engine is not None
        one.guest.serve(self._engine)
        one.link.tell("serve", self._description)

    async def _ask(self, one: _Frontend) -> None:
        with suppress(TimeoutError, LlmjaxError):
            one.guest.take_report(*await asyncio.wait_for(one.link.call("report"), REPORT_SECONDS))

    async def _drained(self, one: _Frontend) -> None:
        with suppress(LlmjaxError):
            await one.link.call("drain")

    def _on_lost(self, one: _Frontend) -> None:
        self._frontends.discard(one)
        one.guest.depart()
        if self._is_ending:
            return
        _kill(one.process)  # where it is only that it has closed the link
        self._deaths.append(time.monotonic())
        if len(self._deaths) == MOST_DEATHS and time.monotonic() - self._deaths[0] < DEATHS_SECONDS:
            logger.error(
                "%d frontends have died within %g s: the server ends", MOST_DEATHS, DEATHS_SECONDS
            )
            self._on_failure()
            return
        logger.error("frontend %s (process %d) has died, its requests with it", *self._name(one))
        task = asyncio.ensure_future(self._start_another())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_another(self) -> None:
        try:
            await self._start_one()
        except OSError as error:
            logger.error("no other frontend can be started: %s", error)
            self._on_failure()

    @staticmethod
    def _name(one: _Frontend) -> tuple[str, int]:
        return one.guest.name, one.process.pid

    @staticmethod
    async def _end(process: asyncio.subprocess.Process) -> None:
        try:
            # Its handlers' last words, and then those of its connections.
            await asyncio.wait_for(process.wait(), 3 * LAST_WORDS_SECONDS)
        except TimeoutError:
            logger.warning("the frontend of process %d does not end and is killed", process.pid)
            _kill(process)
            await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    # Its own method takes the exit status away from those who wait for it.
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
