"""The command line: `llmjax COMMAND`. One module a command; jax is imported only inside them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from llmjax import __version__
from llmjax.errors import LlmjaxError

from . import (
    advise,
    bench,
    chat,
    collect_env,
    convert,
    generate,
    prefill,
    pull,
    quantize,
    run_batch,
    serve,
    simulate,
    tune,
)
from .parser import Parser

COMMANDS = {
    "serve": serve,
    "prefill": prefill,
    "generate": generate,
    "run-batch": run_batch,
    "chat": chat,
    "pull": pull,
    "convert": convert,
    "quantize": quantize,
    "bench": bench,
    "simulate": simulate,
    "advise": advise,
    "tune": tune,
    "collect-env": collect_env,
}


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="llmjax", description="A JAX/XLA inference engine for large language models."
    )
    parser.add_argument("--version", action="version", version=f"llmjax {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        help_text = (module.__doc__ or "").strip().splitlines()[0]
        command = commands.add_parser(name, help=help_text, description=help_text)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; errors of the user's making are one line on stderr and status 1, or 2 where
    the command line cannot be read."""
    args = make_parser().parse_args(argv)
    try:
        return args.run(args)
    except LlmjaxError as error:
        print(f"llmjax: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left; point stdout away so that exit does not complain.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 1


def entry() -> NoReturn:
    """The `llmjax` program."""
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A model still loading, or a step program still compiling, must not hold up the end.
    os._exit(status)
