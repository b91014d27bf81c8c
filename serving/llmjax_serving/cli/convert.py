"""Convert a model to an orbax checkpoint, which loads without conversion."""

from __future__ import annotations

import argparse
import logging

from llmjax.config import DTYPES

from .flags import set_up_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="a catalogue name, folder, .gguf file or hub id")
    parser.add_argument("dst", metavar="DST", help="the folder to write; must not exist")
    parser.add_argument(
        "--dtype", default="auto", choices=DTYPES, help="of the weights; auto keeps theirs [auto]"
    )


def run(args: argparse.Namespace) -> int:
    set_up_logging(logging.INFO)

    from llmjax.checkpoint import convert, resolve_model

    print(convert(resolve_model(args.src), args.dst, dtype=args.dtype))
    return 0
