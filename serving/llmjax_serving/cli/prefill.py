"""Compute prompts for servers that only decode (`llmjax serve --prefill-from`)."""

from __future__ import annotations

import argparse
import logging
import signal
from typing import TYPE_CHECKING

from llmjax.config import EngineConfig
from llmjax.errors import ConfigError

from .flags import add_engine_flags, add_log_level, engine_options, set_up_logging

if TYPE_CHECKING:
    from llmjax.engine.engine import Engine

LISTEN = "tcp://127.0.0.1:9000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, positional_model=True, without=("prefill",))
    parser.add_argument(
        "--listen",
        default=LISTEN,
        metavar="ADDRESS",
        help="tcp://HOST:PORT, for engines anywhere (port 0 takes a free one), or shm://NAME, "
        f"for those of this machine and user [{LISTEN}]",
    )
    add_log_level(parser)


def run(args: argparse.Namespace) -> int:
    set_up_logging(getattr(logging, args.log_level.upper()))
    config = EngineConfig.of(**engine_options(args))
    if config.cache.kv_eviction is not None:
        raise ConfigError(
            f"kv_eviction is {config.cache.kv_eviction!r}, allowed of a prefill worker: none, as "
            "it hands over whole prompts"
        )

    for name in ("data_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(config.parallel, name)) > 1:
            raise ConfigError(
                f"{name} is {size}, allowed of a prefill worker: 1; start several, and give their "
                "addresses to --prefill-from"
            )

    from llmjax.engine.engine import Engine
    from llmjax.engine.prefill_worker import PrefillWorker, terms_of, worker_config
    from llmjax.transfer.server import Listener
    from llmjax.transfer.sockets import Address

    address = Address.of(args.listen)
    if address.kind == "memory":
        raise ConfigError("listen is 'memory', allowed: tcp://HOST:PORT or shm://NAME")
    # The port is taken before the model is loaded, so a conflict shows at once.
    with address.listen() as sock:
        engine = Engine(worker_config(config))
        worker = PrefillWorker(engine)
        listener = Listener(address, sock, terms_of(engine), worker.deliver)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: worker.stop())
        print(banner(engine, listener.address), flush=True)
        try:
            worker.run()
        finally:
            listener.close()
            engine.close()
    return 0


def banner(engine: Engine, address: str) -> str:
    """What an operator wants to know once, and how a server finds this worker."""
    model = engine.config.model.model
    return "\n".join(
        [
            "",
            engine.describe(),
            "",
            f"Ready: {address} (prompts only)",
            "Try:",
            f"  llmjax serve {model} --prefill-from {address}",
            "",
        ]
    )
