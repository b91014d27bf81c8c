"""Command-line flags made from configuration dataclasses: name, type, default and help."""

from __future__ import annotations

import argparse
import inspect
import logging
import re
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from llmjax.checks import WORDS
from llmjax.config import PARTS, EngineConfig, own_fields

from .parser import reader

TALKATIVE = ("jax", "absl", "httpx")
"""Loggers of others that tell their inner workings at the level info."""


def add_engine_flags(
    parser: argparse.ArgumentParser,
    *,
    positional_model: bool = False,
    without: Collection[str] = (),
) -> None:
    """Adds a flag for every field of an engine's configuration, but of the parts `without`."""
    if positional_model:
        parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="as --model")
    for name, part in PARTS.items():
        if name not in without:
            add_flags(parser, part)
    add_flags(parser, EngineConfig, only=own_fields())


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given, as arguments of `EngineConfig.of` and `LLM`.

    Ends the program with a usage message where no model was given.
    """
    names = {field.name for part in PARTS.values() for field in fields(part)} | own_fields()
    options = {name: value for name, value in vars(args).items() if name in names}
    positional = getattr(args, "positional_model", None)
    if positional is not None and options.setdefault("model", positional) != positional:
        args.usage_error("two models were given: MODEL and --model")
    if "model" not in options:
        args.usage_error("a model is needed: --model NAME")
    return options


def add_flags(
    parser: argparse.ArgumentParser, cls: type, only: Collection[str] | None = None
) -> None:
    """Adds a flag for each field of `cls` (or those in `only`).

    A flag that is not given leaves no attribute behind: defaults stay with the dataclass.
    """
    parser.set_defaults(usage_error=parser.error)
    group = parser.add_argument_group((cls.__doc__ or "").strip().splitlines()[0].rstrip("."))
    hints, docs = get_type_hints(cls), attribute_docs(cls)
    for field in fields(cls):
        if only is None or field.name in only:
            add_flag(group, field, hints[field.name], docs.get(field.name, ""))


def add_flag(group: Any, field: Field[Any], hint: Any, doc: str) -> None:
    help_text = doc.replace("%", "%%")
    if field.default not in (MISSING, None):
        default = field.default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        help_text = f"{help_text} [{shown}]".strip()
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_text}
    if hint in (bool, bool | None):
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["type"], options["metavar"] = value_parser(hint)
    group.add_argument(f"--{field.name.replace('_', '-')}", **options)


def value_parser(hint: Any) -> tuple[Callable[[str], Any], str]:
    """How a flag's text is read, and what stands for it in the help."""
    parse, metavar, allowed = _reading(hint)
    return reader(parse, allowed), metavar


def _reading(hint: Any) -> tuple[Callable[[str], Any], str, str]:
    """How a text is read, what stands for it in the help, and what it may be, in words."""
    if get_origin(hint) in (UnionType, Union):
        (inner,) = (arg for arg in get_args(hint) if arg is not NoneType)
        parse, metavar, allowed = _reading(inner)
        allowed = f"{allowed}, or none"
        return lambda text: None if text.lower() == "none" else parse(text), metavar, allowed
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        parse, metavar, _ = _reading(item)
        allowed = f"{WORDS[item][1]} with commas between"
        return lambda text: tuple(map(parse, text.split(","))), f"{metavar},...", allowed
    return hint, {int: "N", float: "X", str: "TEXT"}[hint], WORDS[hint][0]


def add_log_level(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="what is logged to stderr [info]",
    )


def attribute_docs(cls: type) -> dict[str, str]:
    """The texts under "Attributes:" in a class's docstring, by attribute."""
    _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    docs: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if not line.startswith("    "):
            break
        entry = re.match(r"    ([a-z][a-z0-9_]*(?:, [a-z][a-z0-9_]*)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            docs.update(dict.fromkeys(names, entry[2]))
        else:
            docs.update({name: f"{docs[name]} {line.strip()}" for name in names})
    return docs


def set_up_logging(level: int) -> None:
    """Log lines go to stderr; stdout is for what a command was asked to say."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def log_bare(name: str) -> None:
    """Lines of this logger stand as they are: machines read them."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    logger.propagate = False
