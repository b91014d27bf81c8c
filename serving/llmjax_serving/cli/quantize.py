"""Write a quantised copy of a model."""

from __future__ import annotations

import argparse
import logging
from dataclasses import fields

from llmjax.quantize.config import QuantizeConfig

from .flags import add_flags, set_up_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="a catalogue name, folder, .gguf file or hub id")
    parser.add_argument("dst", metavar="DST", help="what to write; must not exist")
    add_flags(parser, QuantizeConfig)


def run(args: argparse.Namespace) -> int:
    set_up_logging(logging.INFO)

    from llmjax.quantize import quantize

    names = {field.name for field in fields(QuantizeConfig)}
    settings = {name: value for name, value in vars(args).items() if name in names}
    if "method" not in settings:
        args.usage_error("a method is needed: --method NAME")
    print(quantize(args.src, args.dst, **settings))
    return 0
