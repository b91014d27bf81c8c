"""A parser whose refusals are one line: the flag, what it is, and what is allowed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn

from llmjax.checks import WORDS, shown


class Parser(argparse.ArgumentParser):
    """Of the program and of each command. Usage is for --help: it would bury what was wrong."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)
        for kind in (int, float):
            self.register("type", kind, reader(kind, WORDS[kind][0]))

    def error(self, message: str) -> NoReturn:
        # argparse says "argument --port: " before what a reader or `_check_value` raises.
        message = re.sub(r"^argument (\S+): is ", r"\1 is ", message).removeprefix("argument ")
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # A command refuses what it does not know itself; the program's help would not tell more.
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, _refusal(value, ", ".join(action.choices)))


def reader(parse: Callable[[str], Any], allowed: str) -> Callable[[str], Any]:
    """Reads a flag's text by `parse`, or tells what is allowed."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(_refusal(text, allowed)) from None

    return read


def _refusal(value: object, allowed: str) -> str:
    return f"is {shown(value)}, allowed: {allowed}"
