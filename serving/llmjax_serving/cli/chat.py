"""Talk to a model in the terminal."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

from llmjax.errors import ConfigError, InvalidRequestError
from llmjax.request import SamplingParams

from .flags import add_engine_flags, engine_options, set_up_logging
from .generate import add_sampling_flags, sampling_params

if TYPE_CHECKING:
    from llmjax import LLM

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, positional_model=True)
    add_sampling_flags(parser, skip=("n",))
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")


def run(args: argparse.Namespace) -> int:
    set_up_logging(logging.WARNING)
    options = engine_options(args)
    sampling_params(args)  # what is out of range is refused before the model loads
    if "chat_template" not in options:
        require_chat_template(options["model"])

    from llmjax import LLM

    llm = LLM(**options)
    params = sampling_params(args, max_tokens=None, **llm.engine.model.generation_defaults)
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives input() line editing and history

        print(HELP)
    converse(llm, params, args.system)
    return 0


def require_chat_template(model: str) -> None:
    """Raises ConfigError, before the model loads, where it has none."""
    from llmjax.checkpoint import open_checkpoint, resolve_model

    checkpoint = open_checkpoint(resolve_model(model))
    if checkpoint.read_text_side().tokenizer.chat_template is None:
        raise ConfigError(
            f"{model} has no chat template, so it was not trained to chat; give it one with "
            "--chat-template FILE (Jinja), or complete text with `llmjax generate`"
        )


def converse(llm: LLM, params: SamplingParams, system: str | None) -> None:
    """Reads turns from stdin until its end."""
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(opening)
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                messages.append({"role": "assistant", "content": answer(llm, messages, params)})
            except InvalidRequestError as error:
                messages.pop()
                print(f"llmjax: {error}", file=sys.stderr)


def answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Prints the answer as it comes; Ctrl-C keeps what there is."""
    said = ""
    try:
        for output in llm.stream(messages, params):
            for choice in output.outputs:
                said += choice.text
                print(choice.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print()
    return said
