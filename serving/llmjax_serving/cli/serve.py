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
from .flags import add_engine_flags, add_flags, add_log_level, engine_options, set_up_logging

if TYPE_CHECKING:
    from llmjax.engine.async_engine import AsyncEngine
    from llmjax.engine.pooling import PoolingEngine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, positional_model=True)
    add_flags(parser, ServerConfig)
    add_log_level(parser)


def run(args: argparse.Namespace) -> int:
    set_up_logging(getattr(logging, args.log_level.upper()))
    engine_config = EngineConfig.of(**engine_options(args))
    given = {f.name: getattr(args, f.name) for f in fields(ServerConfig) if hasattr(args, f.name)}
    given.setdefault("api_key", os.environ.get("LLMJAX_API_KEY"))
    server_config = ServerConfig(**given)

    from ..server import serve

    def on_ready(engine: AsyncEngine | PoolingEngine, url: str) -> None:
        print(banner(engine, url, server_config), flush=True)

    return asyncio.run(serve(engine_config, server_config, on_ready))


def banner(engine: AsyncEngine | PoolingEngine, url: str, config: ServerConfig) -> str:
    """What an operator wants to know once, and a command to try."""
    return "\n".join(
        [
            "",
            engine.describe(),
            "",
            f"Ready: {url}/v1" + ("" if config.api_key else " (open: no --api-key)"),
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
    key = ' -H "Authorization: Bearer $LLMJAX_API_KEY"' if config.api_key else ""
    data = shlex.quote(json.dumps(body))
    return f"curl {url}{path}{key} -H 'Content-Type: application/json' -d {data}"
