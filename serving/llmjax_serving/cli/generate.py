"""Complete prompts and print what the model says."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import fields

from llmjax.errors import ConfigError
from llmjax.request import SamplingParams

from .flags import add_engine_flags, add_flags, engine_options, set_up_logging

SAMPLING_FLAGS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def add_sampling_flags(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ()) -> None:
    add_flags(parser, SamplingParams, only=set(SAMPLING_FLAGS) - set(skip))
    parser.epilog = "Sampling defaults are the model's own where its authors recommend any."
    parser.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="text that ends a completion; may be given several times",
    )


def sampling_params(args: argparse.Namespace, **defaults: float | None) -> SamplingParams:
    """What the flags ask for, on top of `defaults`: the values the model's authors recommend."""
    given = {f.name for f in fields(SamplingParams)} & {*SAMPLING_FLAGS, "stop"} & vars(args).keys()
    return SamplingParams(**{**defaults, **{name: getattr(args, name) for name in given}})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="text to complete; none reads stdin"
    )
    add_engine_flags(parser)
    add_sampling_flags(parser)


def run(args: argparse.Namespace) -> int:
    set_up_logging(logging.WARNING)
    options = engine_options(args)
    sampling_params(args)  # what is out of range is refused before the model loads
    prompts = args.prompts or [sys.stdin.read()]
    if not all(prompts):
        raise ConfigError("a prompt is empty; give some text")

    from llmjax import LLM

    llm = LLM(**options)
    params = sampling_params(args, **llm.engine.model.generation_defaults)
    if len(prompts) == 1 and params.n == 1:
        for output in llm.stream(prompts[0], params):
            print("".join(choice.text for choice in output.outputs), end="", flush=True)
        print()
        return 0
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        for choice in output.outputs:
            print(f"--- {prompt!r} [{choice.index}, {choice.finish_reason}]\n{choice.text}")
    return 0
