"""Tokens per second of a batch of prompts through `LLM`, without HTTP."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from ..checkpoint import open_checkpoint, resolve_model
from ..checkpoint.architecture import require_decoder
from ..config import EngineConfig
from ..errors import ConfigError
from ..llm import LLM
from ..request import SamplingParams
from ..tokenizer import Tokenizer


@dataclass(frozen=True)
class Throughput:
    """What a run did; `seconds` is wall time from the first prompt in to the last token out."""

    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    seconds: float

    def table(self) -> str:
        counts = {
            "prompts": self.num_prompts,
            "prompt tokens": self.prompt_tokens,
            "output tokens": self.output_tokens,
            "all tokens": self.prompt_tokens + self.output_tokens,
        }
        lines = [f"{'':<14}{'count':>12}{'per second':>14}"]
        for name, count in counts.items():
            lines.append(f"{name:<14}{count:>12,}{count / self.seconds:>14,.1f}")
        return "\n".join([*lines, f"{'seconds':<14}{self.seconds:>12.2f}"])


def headers_of(config: EngineConfig) -> tuple[Tokenizer, int]:
    """A model's tokenizer and context, without its weights. The KV pool may yet hold less.

    Raises:
        ModelLoadError: the model cannot be found, or does not generate text.
    """
    checkpoint = open_checkpoint(resolve_model(config.model.model))
    own = require_decoder(checkpoint.read_architecture()[0]).max_position
    return checkpoint.read_text_side().tokenizer, config.model.max_model_len or own


def random_prompts(tokenizer: Tokenizer, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` ordinary tokens."""
    ids = sorted(set(range(tokenizer.vocab_size)) - tokenizer.special_ids)
    rng = random.Random(seed)
    return [rng.choices(ids, k=length) for _ in range(count)]


def file_prompts(tokenizer: Tokenizer, path: Path, count: int) -> list[list[int]]:
    """`count` prompts from a file, from its start again where it has fewer.

    Args:
        path: one prompt a line; in a .jsonl file the `prompt` of each object.

    Raises:
        ConfigError: the file cannot be read as that, or is empty.
    """
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        if path.suffix == ".jsonl":
            lines = [json.loads(line)["prompt"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read prompts from {path}: {error!r}") from error
    if not lines:
        raise ConfigError(f"{path} has no prompts")
    return [tokenizer.encode(text) for text in islice(cycle(lines), count)]


def measure(llm: LLM, prompts: list[list[int]], output_len: int) -> Throughput:
    """Runs all prompts at once, each for exactly `output_len` greedy tokens.

    Raises:
        InvalidRequestError: a prompt with its output does not fit the context.
    """
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    return Throughput(
        num_prompts=len(prompts),
        prompt_tokens=sum(map(len, prompts)),
        output_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        seconds=seconds,
    )
