"""Measure throughput and start-up."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from llmjax import __version__
from llmjax.errors import ConfigError

from .flags import add_engine_flags, engine_options, set_up_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    help_text = "tokens per second of a batch, without HTTP"
    throughput = kinds.add_parser(
        "throughput", help=help_text, description=help_text, allow_abbrev=False
    )
    throughput.set_defaults(run_bench=run_throughput)
    add_engine_flags(throughput)
    group = throughput.add_argument_group("Load")
    group.add_argument("--num-prompts", type=int, default=64, metavar="N", help="[64]")
    group.add_argument(
        "--input-len", type=int, default=128, metavar="N", help="tokens of a random prompt [128]"
    )
    group.add_argument(
        "--output-len", type=int, default=128, metavar="N", help="tokens generated for each [128]"
    )
    group.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="prompts instead of random ones: a text file's lines, or .jsonl with a prompt field",
    )
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the results here")
    help_text = "seconds from starting a server to its first answer, cold and again"
    startup = kinds.add_parser("startup", help=help_text, description=help_text, allow_abbrev=False)
    startup.set_defaults(run_bench=run_startup)
    startup.add_argument("--model", required=True, help="as for llmjax serve")
    startup.add_argument("--port", type=int, default=8765, metavar="N", help="[8765]")


def run(args: argparse.Namespace) -> int:
    return args.run_bench(args)


def run_throughput(args: argparse.Namespace) -> int:
    set_up_logging(logging.WARNING)
    for name in ("num_prompts", "input_len", "output_len"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} is {getattr(args, name)}, allowed: 1 or more")
    # A program that compiles beside the measured run would disturb it.
    options = {"background": False, **engine_options(args)}
    report_to(args.output_json)

    import jax

    from llmjax import LLM
    from llmjax.bench import throughput

    llm = LLM(**options)
    if args.dataset:
        prompts = throughput.file_prompts(llm.tokenizer, args.dataset, args.num_prompts)
    else:
        prompts = throughput.random_prompts(llm.tokenizer, args.num_prompts, args.input_len)
    result = throughput.measure(llm, prompts, args.output_len)
    print(result.table())
    if args.output_json:
        device = jax.devices()[0].device_kind
        software = {"llmjax": __version__, "jax": jax.__version__, "device": device}
        report = {**asdict(result), "options": options, **software}
        args.output_json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def report_to(file: Path | None) -> None:
    """Raises ConfigError, before any work is done, where the results could not be written."""
    if file is not None:
        try:
            file.open("a").close()
        except OSError as error:
            raise ConfigError(f"cannot write --output-json {file}: {error}") from error


def run_startup(args: argparse.Namespace) -> int:
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
