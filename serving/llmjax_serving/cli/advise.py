"""Say which quantisation to serve a model in, on how many devices, and why."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields

from llmjax import advise
from llmjax.advise.question import Question

from .flags import add_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Question)
    parser.add_argument(
        "--json", action="store_true", help="all figures as JSON, in bytes and seconds"
    )


def run(args: argparse.Namespace) -> int:
    from llmjax.advise.report import as_json, table

    asked = {f.name: getattr(args, f.name) for f in fields(Question) if hasattr(args, f.name)}
    for name in ("model", "gpu"):
        if name not in asked:
            args.usage_error(f"a {name} is needed: --{name} NAME")
    advice = advise(**asked)
    print(json.dumps(as_json(advice), indent=2) if args.json else table(advice))
    return 0
