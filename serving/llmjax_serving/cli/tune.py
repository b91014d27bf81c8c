"""Time how kernels are best cut on this machine's GPU, and keep it for later starts."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from llmjax.config import QUANTIZATIONS

from .flags import set_up_logging

TOKENS = (16, 32, 64, 256, 2048)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="whose steps: a catalogue name, folder, or hub id"
    )
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="of the weights, whose products are timed too [floats, which XLA multiplies]",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2"),
        default="bfloat16",
        help="of the pages [bfloat16]",
    )
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="most tokens of a request [the model's own]"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        metavar="T",
        help="in a step, with --quantization [16 32 64 256 2048]",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="for the device's JSON file [where kernels look: the installed package]",
    )


def run(args: argparse.Namespace) -> int:
    set_up_logging(logging.INFO)

    from llmjax.bench.tune import tune
    from llmjax.checkpoint import resolve_model
    from llmjax.checkpoint.architecture import require_decoder
    from llmjax.checkpoint.detect import open_checkpoint
    from llmjax.errors import ConfigError

    if args.tokens is not None and args.quantization is None:
        raise ConfigError("--tokens is of products, allowed with --quantization alone")
    tokens = args.tokens or TOKENS
    if min(tokens) < 1:
        raise ConfigError(f"--tokens is {tokens}, allowed: 1 or more each")
    if args.max_model_len is not None and args.max_model_len < 1:
        raise ConfigError(f"--max-model-len is {args.max_model_len}, allowed: 1 or more")
    if args.output is not None and not args.output.is_dir():
        raise ConfigError(f"--output is {args.output}, which is no folder")
    config, _ = open_checkpoint(resolve_model(args.model)).read_architecture()
    path = tune(
        require_decoder(config),
        args.quantization,
        tokens,
        kv_format=args.kv_cache_dtype,
        max_model_len=args.max_model_len,
        folder=args.output,
    )
    print(path)
    return 0
