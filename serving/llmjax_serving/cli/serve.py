"""Serve a model over HTTP, with OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shlex
import signal
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from llmjax import __version__
from llmjax.config import EngineConfig
from llmjax.distributed import DistributedConfig, check_together, shared_options

from ..config import ServerConfig
from .flags import (
    add_engine_flags,
    add_flags,
    add_log_level,
    engine_options,
    log_bare,
    set_up_logging,
)

if TYPE_CHECKING:
    from llmjax.engine.async_engine import AsyncEngine
    from llmjax.engine.pooling import PoolingEngine
    from llmjax.parallel.group import Group

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, positional_model=True)
    add_flags(parser, DistributedConfig)
    add_flags(parser, ServerConfig)
    add_log_level(parser)


def run(args: argparse.Namespace) -> int:
    set_up_logging(getattr(logging, args.log_level.upper()))
    if getattr(args, "access_log_format", None) == "json":
        log_bare("llmjax_serving.access")
    engine_config = EngineConfig.of(**engine_options(args))
    given = given_of(args, ServerConfig)
    if "LLMJAX_API_KEY" in os.environ:
        given.setdefault("api_key", tuple(os.environ["LLMJAX_API_KEY"].split(",")))
    server_config = ServerConfig(**given)
    distributed = DistributedConfig(**given_of(args, DistributedConfig))
    group = None
    if distributed.coordinator_address is not None:
        group = join(engine_config, distributed)
        if not group.leads:
            return follow(engine_config, group)

    from ..server import serve

    def on_ready(engine: AsyncEngine | PoolingEngine, url: str) -> None:
        print(banner(engine, url, server_config), flush=True)

    return asyncio.run(serve(engine_config, server_config, on_ready, group))


def given_of(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of a configuration that were given."""
    return {f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)}


def join(config: EngineConfig, distributed: DistributedConfig) -> Group:
    """Meets the other processes, which must have been started alike."""
    check_together(config)

    import jax

    from llmjax.parallel.group import Group
    from llmjax_kernels.paged_attention import serving

    group = Group.join(distributed)
    versions = {"llmjax": __version__, "jax": jax.__version__, "kernels": serving()}
    group.require_same(shared_options(config) | versions)
    return group


def follow(config: EngineConfig, group: Group) -> int:
    """Computes what process 0 says, and takes no requests."""
    from llmjax.engine.engine import Engine
    from llmjax.engine.follower import Follower

    try:
        follower = Follower(Engine(replace(config, trace=None), group=group), group)

        def on_signal(number: int, frame: object) -> None:
            if number == signal.SIGTERM and follower.patient:
                follower.patient = False
                logger.info("SIGTERM: process 0 says when")  # it lets requests end first
            else:
                follower.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
        print(f"Ready: process {group.index} of {group.size}, which follows process 0", flush=True)
        follower.run()
    except BaseException as error:
        group.fail(str(error) or type(error).__name__)
        raise
    group.end()
    return 0


def banner(engine: AsyncEngine | PoolingEngine, url: str, config: ServerConfig) -> str:
    """What an operator wants to know once, and a command to try."""
    return "\n".join(
        [
            "",
            engine.describe(),
            "",
            f"Ready: {url}/v1"
            + (f" at {config.uds}" if config.uds is not None else "")
            + ("" if config.has_keys else " (open: no --api-key)"),
            "Try:",
            f"  {curl(engine, url, config)}",
            "",
        ]
    )


def curl(engine: AsyncEngine | PoolingEngine, url: str, config: ServerConfig) -> str:
    """A request that works as pasted into a shell."""
    from llmjax.engine.pooling import PoolingEngine

    body: dict = {"model": engine.config.model.name}
    if isinstance(engine, PoolingEngine):
        path = "/v1/embeddings" if engine.task == "embed" else "/rerank"
        documents = ["Water is made of hydrogen and oxygen.", "The sky is blue."]
        query = {"query": "What is water made of?", "documents": documents}
        body |= {"input": documents} if engine.task == "embed" else query
    elif engine.tokenizer.chat_template:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "What is water made of?"}]
    else:
        path = "/v1/completions"
        body["prompt"] = "The capital of France is"
    if not isinstance(engine, PoolingEngine):
        body |= {"temperature": 0, "max_tokens": 64}
    key = ' -H "Authorization: Bearer ${LLMJAX_API_KEY%%,*}"' if config.has_keys else ""
    data = shlex.quote(json.dumps(body))
    socket = f"--unix-socket {shlex.quote(config.uds)} " if config.uds is not None else ""
    return f"curl {socket}{url}{path}{key} -H 'Content-Type: application/json' -d {data}"
