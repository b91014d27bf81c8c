"""A server's life: bind, load, serve, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from aiohttp import web

from llmjax.config import EngineConfig
from llmjax.errors import ConfigError, LlmjaxError

from .app import make_app
from .batches import running_batches
from .config import ServerConfig
from .frontends.supervisor import Frontends
from .frontends.worker import Setup
from .listen import bind, current_certificate, raise_file_limit, tls_context, url
from .private_site import private_site
from .running import BACKLOG, LAST_WORDS_SECONDS, make_runner
from .state import ServerState
from .stats_log import logged_stats

if TYPE_CHECKING:
    from llmjax.engine.async_engine import AsyncEngine
    from llmjax.engine.pooling import PoolingEngine

    AnyEngine = AsyncEngine | PoolingEngine
    from llmjax.parallel.group import Group

logger = logging.getLogger(__name__)


def load_engine(config: EngineConfig, group: Group | None) -> AnyEngine:
    from llmjax.engine.async_engine import AsyncEngine
    from llmjax.engine.pooling import make_pooling_engine

    pooling = make_pooling_engine(config)
    if pooling is not None and group is not None:
        raise ConfigError(
            f"num_processes is {group.size}, allowed for a model that embeds or scores: none"
        )
    return pooling or AsyncEngine(config, group)


def in_daemon_thread(work: Callable[[], AnyEngine]) -> asyncio.Future[AnyEngine]:
    """Runs `work` in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[AnyEngine] = loop.create_future()

    def settle(result: AnyEngine | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        elif result is not None:
            future.set_result(result)

    def target() -> None:
        try:
            result, error = work(), None
        except BaseException as caught:
            result, error = None, caught
        # The loop is closed where the server has ended meanwhile.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=target, name="load", daemon=True).start()
    return future


class Server:
    """One model behind one port.

    Args:
        load: makes the engine; may take long and runs in a thread.
        on_ready: called with the engine and the URL when requests are taken.
    """

    def __init__(
        self,
        state: ServerState,
        load: Callable[[], AnyEngine],
        on_ready: Callable[[AnyEngine, str], None],
    ):
        self.state = state
        self._load = load
        self._on_ready = on_ready
        self._signals = 0
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Serves until SIGTERM or SIGINT, or until the engine has died.

        The port is taken before the model is loaded, so a conflict shows at once.

        Returns:
            The exit status: 0, or 1 where a second signal cut requests off, or the engine or too
            many frontends have died.

        Raises:
            LlmjaxError: the port cannot be had or the model cannot be loaded.
        """
        config = self.state.config
        raise_file_limit()
        app, tls, sock = make_app(self.state), tls_context(config), bind(config)
        # Frontends write a line about each request that they take, or hand on.
        runner = make_runner(app, config, logs_access=config.api_server_count == 1)
        try:
            await runner.setup()
            self._listen_to_signals()
            async with self._taking_requests(runner, sock, tls):
                engine = await self._loaded()
                if engine is None:
                    return self._status
                engine.start()
                self.state.put(engine)
                self._on_ready(engine, url(sock, config))
                interval = config.log_stats_interval
                async with logged_stats(engine, interval), running_batches(runner):
                    await first_of(asyncio.ensure_future(engine.ended.wait()), self._stop)
                    if engine.ended.is_set():
                        return await self._mourn(engine)
                    return await self._drain(engine)
        finally:
            await runner.cleanup()
            sock.close()
            if config.uds is not None:
                with suppress(FileNotFoundError):
                    os.unlink(config.uds)
            self.state.close()

    @asynccontextmanager
    async def _taking_requests(
        self, runner: web.AppRunner, sock: socket.socket, tls: ssl.SSLContext | None
    ) -> AsyncIterator[None]:
        """Clients are answered meanwhile, by this process or by frontends."""
        state, config = self.state, self.state.config
        if config.api_server_count == 1:
            await web.SockSite(runner, sock, backlog=BACKLOG, ssl_context=tls).start()
            async with current_certificate(tls, config):
                yield
            return
        async with private_site(runner) as path:
            level = logging.getLogger().getEffectiveLevel()
            setup = Setup(state.model_name, config, state.created, level, path)
            state.frontends = Frontends(runner.app, sock, setup, self._give_up)
            try:
                await state.frontends.start()
                yield
            finally:
                await state.frontends.stop()

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        self.state.draining = True
        if self._signals == 1:
            logger.info("%s: no new requests are taken", number.name)
            self._stop.set()
        else:
            logger.info("%s again: stopping now", number.name)
            self._stop_now.set()

    def _give_up(self) -> None:
        """Frontends die again and again: what runs may end, and that is it."""
        self._status, self.state.draining = 1, True
        self._stop.set()

    async def _loaded(self) -> AnyEngine | None:
        """The engine, or None where a signal came first."""
        loading = in_daemon_thread(self._load)
        await first_of(loading, self._stop)
        if not loading.done():
            loading.cancel()
            return None
        return loading.result()

    async def _drain(self, engine: AnyEngine) -> int:
        timeout = self.state.config.shutdown_timeout
        logger.info("waiting up to %g s for running requests: %d", timeout, engine.num_requests)
        draining = asyncio.ensure_future(self._drained(engine, timeout))
        await first_of(draining, self._stop_now)
        told_to = not draining.done()
        if told_to:
            cut_off = engine.num_requests
            draining.cancel()
            engine.stop()
        else:
            cut_off = draining.result()
            # Other processes learn from the engine's end that it is the end.
            with suppress(TimeoutError):
                await asyncio.wait_for(engine.ended.wait(), LAST_WORDS_SECONDS)
        if cut_off:
            logger.warning("requests cut off: %d", cut_off)
        else:
            logger.info("all of them have ended")
        await self._last_words()
        return 1 if told_to else self._status

    async def _drained(self, engine: AnyEngine, timeout: float) -> int:
        """See `AsyncEngine.drain`; answers that frontends still send are waited for too."""
        began = time.monotonic()
        if self.state.frontends is not None:
            await self.state.frontends.drain(timeout)
        return await engine.drain(max(0.0, timeout - (time.monotonic() - began)))

    async def _mourn(self, engine: AnyEngine) -> int:
        """Requests have failed, and more would: whoever watches this process may start another."""
        try:
            engine.check_health()
        except LlmjaxError as error:
            logger.error("%s", error)
        await self._last_words()
        return 1

    async def _last_words(self) -> None:
        """Gives handlers time to tell their clients how it ended."""
        if self.state.active:
            await asyncio.wait(self.state.active, timeout=LAST_WORDS_SECONDS)


async def first_of(future: asyncio.Future[Any], event: asyncio.Event) -> None:
    """Waits until `future` is done or `event` is set."""
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait({future, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


async def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    on_ready: Callable[[AnyEngine, str], None],
    group: Group | None = None,
) -> int:
    """Loads the model and serves it; see `Server.run`."""
    state = ServerState(engine_config.model.name, server_config)
    return await Server(state, lambda: load_engine(engine_config, group), on_ready).run()
