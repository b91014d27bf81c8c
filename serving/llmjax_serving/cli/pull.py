"""Download a model so that it is there when needed."""

from __future__ import annotations

import argparse
import logging

from llmjax.catalogue import CATALOGUE

from .flags import set_up_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME", help="a name of the catalogue, or a hub id")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    entries = CATALOGUE.values()
    lines = [f"  {e.name:<24}{e.size / 1e6:>6,.0f} MB  {e.description}" for e in entries]
    parser.epilog = "\n".join(["the catalogue:", *lines])


def run(args: argparse.Namespace) -> int:
    set_up_logging(logging.INFO)

    from llmjax.checkpoint import pull

    print(pull(args.model))
    return 0
