"""Serve a model over HTTP, with OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shlex
from dataclasses import fields
from typing import TYPE_CHECKING

from llmjax.config import EngineConfig

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, positional_model=True)
    add_flags(parser, ServerConfig)
    add_log_level(parser)


def run(args: argparse.Namespace) -> int:
    set_up_logging(getattr(logging, args.log_level.upper()))
    if getattr(args, "access_log_format", None) == "json":
        log_bare("llmjax_serving.access")
    engine_config = EngineConfig.of(**engine_options(args))
    given = {f.name: getattr(args, f.name) for f in fields(ServerConfig) if hasattr(args, f.name)}
    if "LLMJAX_API_KEY" in os.environ:
        given.setdefault("api_key", tuple(os.environ["LLMJAX_API_KEY"].split(",")))
    server_config = ServerConfig(**given)

    from ..server import serve

    def on_ready(engine: AsyncEngine, url: str) -> None:
        print(banner(engine, url, server_config), flush=True)

    return asyncio.run(serve(engine_config, server_config, on_ready))


def banner(engine: AsyncEngine, url: str, config: ServerConfig) -> str:
    """What an operator wants to know once, and a command to try."""
    return "\n".join(
        [
            "",
            engine.engine.describe(),
            "",
            f"Ready: {url}/v1"
            + (f" at {config.uds}" if config.uds is not None else "")
            + ("" if config.has_keys else " (open: no --api-key)"),
            "Try:",
            f"  {curl(engine, url, config)}",
            "",
        ]
    )


def curl(engine: AsyncEngine, url: str, config: ServerConfig) -> str:
    """A request that works as pasted into a shell."""
    body: dict = {"model": engine.config.model.name}
    if engine.tokenizer.chat_template:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "What is water made of?"}]
    else:
        path = "/v1/completions"
        body["prompt"] = "The capital of France is"
    body |= {"temperature": 0, "max_tokens": 64}
    key = ' -H "Authorization: Bearer ${LLMJAX_API_KEY%%,*}"' if config.has_keys else ""
    data = shlex.quote(json.dumps(body))
    socket = f"--unix-socket {shlex.quote(config.uds)} " if config.uds is not None else ""
    return f"curl {socket}{url}{path}{key} -H 'Content-Type: application/json' -d {data}"
