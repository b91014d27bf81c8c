"""Measure throughput, latency, a server under load, and start-up."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmjax import __version__
from llmjax.bench.lengths import require_room
from llmjax.config import EngineConfig
from llmjax.errors import ConfigError

from .flags import add_engine_flags, engine_options, set_up_logging
from .results import require_writable, write_json

BASE_URL = re.compile(
    r"https?://(?:[^/?#@\s]+@)?(?:[^/?#@:\s\[\]]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?:/[^?#\s]*)?",
    re.IGNORECASE,
)

THROUGHPUT = {
    "num_prompts": (64, "prompts, all at once"),
    "input_len": (128, "tokens of a random prompt"),
    "output_len": (128, "tokens generated for each"),
}
LATENCY = {
    "input_len": (512, "tokens of the prompt whose prefill is timed"),
    "output_len": (64, "decode steps of a run"),
    "num_iters": (5, "runs of each kind, of which the median counts"),
}
SERVE = {
    "num_prompts": (128, "requests in all"),
    "max_concurrency": (32, "requests at a time"),
    "input_len": (128, "tokens of a prompt, about: random words"),
    "output_len": (64, "tokens asked for, past a natural end where the server can"),
}
"""The flags of each kind: default and meaning."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    _add_throughput(kinds)
    _add_latency(kinds)
    _add_serve(kinds)
    _add_startup(kinds)


def _add_kind(
    kinds: Any, name: str, run: Callable[[argparse.Namespace], int], help_text: str
) -> argparse.ArgumentParser:
    kind = kinds.add_parser(name, help=help_text, description=help_text)
    kind.set_defaults(run_bench=run)
    return kind


def _add_counts(group: Any, counts: dict[str, tuple[int, str]]) -> None:
    """Flags of a number from 1 up each: the default, and what it is."""
    for name, (default, help_text) in counts.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{help_text} [{default}]"
        )
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the results here")


def _add_throughput(kinds: Any) -> None:
    parser = _add_kind(
        kinds, "throughput", run_throughput, "tokens per second of a batch, without HTTP"
    )
    add_engine_flags(parser)
    group = parser.add_argument_group("Load")
    _add_counts(group, THROUGHPUT)
    group.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="prompts instead of random ones: a text file's lines, or .jsonl with a prompt field",
    )


def _add_latency(kinds: Any) -> None:
    parser = _add_kind(
        kinds, "latency", run_latency, "time of a decode step, and of a prompt, without HTTP"
    )
    add_engine_flags(parser)
    group = parser.add_argument_group("Load")
    group.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        default=[1, 4, 16, 32, 64],
        metavar="N",
        help="streams that decode together [1 4 16 32 64]",
    )
    _add_counts(group, LATENCY)


def _add_serve(kinds: Any) -> None:
    parser = _add_kind(
        kinds, "serve", run_serve, "load on any OpenAI-compatible server over HTTP, streaming"
    )
    parser.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="[%(default)s]"
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="as the server calls it")
    parser.add_argument(
        "--endpoint",
        choices=("/v1/completions", "/v1/chat/completions"),
        default="/v1/completions",
        help="[%(default)s]",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("LLMJAX_API_KEY", "").partition(",")[0] or None,
        metavar="KEY",
        help="by default the variable LLMJAX_API_KEY",
    )
    group = parser.add_argument_group("Load")
    _add_counts(group, SERVE)
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="another one gives other prompts [0]"
    )


def _add_startup(kinds: Any) -> None:
    parser = _add_kind(
        kinds,
        "startup",
        run_startup,
        "seconds from starting a server to its first answer, cold and again",
    )
    parser.add_argument("--model", required=True, help="as for llmjax serve")
    parser.add_argument("--port", type=int, default=8765, metavar="N", help="[8765]")


def run(args: argparse.Namespace) -> int:
    return args.run_bench(args)


def run_throughput(args: argparse.Namespace) -> int:
    set_up_logging(logging.WARNING)
    check_counts(args, THROUGHPUT)
    options = quiet_engine_options(args)
    prompts = make_prompts(args, EngineConfig.of(**options))

    from llmjax import LLM
    from llmjax.bench import throughput

    with LLM(**options) as llm:
        result = throughput.measure(llm, prompts, args.output_len)
    print(result.table())
    report = {**asdict(result), "options": options, **software()}
    write_json("--output-json", args.output_json, report)
    return 0


def make_prompts(args: argparse.Namespace, config: EngineConfig) -> list[list[int]]:
    """Of a run of throughput. Raises ConfigError, before weights load, where they do not fit."""
    from llmjax.bench import throughput

    tokenizer, context = throughput.headers_of(config)
    if args.dataset is None:
        require_room(context, {"input_len": args.input_len, "output_len": args.output_len})
        return throughput.random_prompts(tokenizer, args.num_prompts, args.input_len)
    prompts = throughput.file_prompts(tokenizer, args.dataset, args.num_prompts)
    longest = max(map(len, prompts))
    require_room(context, {"dataset's longest prompt": longest, "output_len": args.output_len})
    return prompts


def run_latency(args: argparse.Namespace) -> int:
    set_up_logging(logging.WARNING)
    check_counts(args, LATENCY)
    sizes = args.batch_sizes
    options = quiet_engine_options(args)
    config = EngineConfig.of(**options)
    most = config.scheduler.max_num_seqs
    if min(sizes) < 1 or max(sizes) > most:
        raise ConfigError(f"batch_sizes is {sizes}, allowed: 1 to max_num_seqs ({most})")

    from llmjax import LLM
    from llmjax.bench import latency
    from llmjax.bench.throughput import headers_of

    _, context = headers_of(config)
    require_room(context, {"input_len": args.input_len}, beside=1)
    beside = latency.PROMPT_LEN + latency.HEAD_START
    require_room(context, {"output_len": args.output_len}, beside=beside)
    with LLM(**options) as llm:
        load = {"steps": args.output_len, "input_len": args.input_len, "num_iters": args.num_iters}
        result = latency.measure(llm, sizes, **load)
        work = latency.Work.of(llm.engine.model)
    print(result.table())
    report = {**result.report(), "output_len": args.output_len, "work": asdict(work)}
    write_json("--output-json", args.output_json, {**report, "options": options, **software()})
    return 0


def run_serve(args: argparse.Namespace) -> int:
    check_counts(args, SERVE)
    url = server_url(args.base_url)

    from llmjax.bench import serve

    target = serve.Target(url, args.endpoint, args.model, args.api_key)
    load = serve.Load(**{name: getattr(args, name) for name in SERVE}, seed=args.seed)
    result = serve.measure(target, load)
    print(result.table())
    about = {"base_url": args.base_url, "endpoint": args.endpoint, "model": args.model}
    write_json("--output-json", args.output_json, {**result.report(), **asdict(load), **about})
    return 0


def check_counts(args: argparse.Namespace, names: Iterable[str]) -> None:
    """Raises ConfigError, before any work is done, for what could only fail after it."""
    for name in names:
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} is {getattr(args, name)}, allowed: 1 or more")
    require_writable("--output-json", args.output_json)


def server_url(text: str) -> str:
    """A base URL up to where an endpoint begins.

    Raises:
        ConfigError: it is none.
    """
    match = BASE_URL.fullmatch(text)
    if match is None or int(match["port"] or 0) > 65535:
        raise ConfigError(
            f"base_url is {text!r}, allowed: a URL such as http://127.0.0.1:8000: http or https, "
            "a host, and a port of 0 to 65535 if any"
        )
    return text.rstrip("/").removesuffix("/v1")


def quiet_engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Of an engine that compiles nothing beside the measured run, which it would disturb."""
    return {"background": False, **engine_options(args)}


def software() -> dict[str, str]:
    import jax

    device = jax.devices()[0].device_kind
    return {"llmjax": __version__, "jax": jax.__version__, "device": device}


def run_startup(args: argparse.Namespace) -> int:
    if not 1 <= args.port <= 65535:
        raise ConfigError(f"port is {args.port}, allowed: 1 to 65535")

    from llmjax.bench import startup
    from llmjax.checkpoint import resolve_model

    resolve_model(args.model)  # fetching the model is not part of starting
    with tempfile.TemporaryDirectory() as programs:
        command = [sys.executable, "-m", "llmjax_serving.cli", "serve", "--model", args.model]
        command += ["--port", str(args.port), "--compilation-cache-dir", programs]
        for title in ("cold: no compiled programs", "again: programs from the cache"):
            print(title, flush=True)
            print(startup.measure(command).table(), flush=True)
    return 0
