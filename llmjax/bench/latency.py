"""How long a decode step and a prompt take through `LLM`, by streams, without HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from flax import nnx
from tqdm.auto import tqdm

from ..cache.layout import KVLayout
from ..checkpoint import LoadedModel
from ..engine.memory import page_bytes
from ..llm import LLM
from ..request import SamplingParams
from .throughput import random_prompts

PROMPT_LEN = 16
"""Of the streams that decode."""
HEAD_START = 2
"""Tokens that a decoding run makes before those that count."""


@dataclass(frozen=True)
class Times:
    """Seconds that something took, run by run, and the tokens that each run made or read."""

    tokens: int
    runs: list[float]

    @property
    def seconds(self) -> float:
        return median(self.runs)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def report(self) -> dict[str, Any]:
        return {
            "tokens_per_second": self.tokens_per_second,
            "ms": 1e3 * self.seconds,
            "ms_of_runs": [1e3 * run for run in self.runs],
        }


@dataclass(frozen=True)
class Latency:
    """Attributes:
    decode: of one step, by the sequences in it.
    prefill: of one prompt, to its first output token.
    """

    decode: dict[int, Times]
    prefill: Times

    def table(self) -> str:
        lines = [f"{'':<22}{'tokens/s':>12}{'ms':>10}{'fastest':>10}{'slowest':>10}"]
        rows = {f"decode, {n} stream{'s' * (n > 1)}": t for n, t in self.decode.items()}
        rows[f"prefill of {self.prefill.tokens:,}"] = self.prefill
        for name, times in rows.items():
            rate = f"{name:<22}{times.tokens_per_second:>12,.1f}"
            each = (times.seconds, min(times.runs), max(times.runs))
            lines.append(rate + "".join(f"{1e3 * seconds:>10.2f}" for seconds in each))
        return "\n".join(lines)

    def report(self) -> dict[str, Any]:
        decode = [{"batch_size": n, **times.report()} for n, times in self.decode.items()]
        return {
            "decode": decode,
            "prefill": {"input_len": self.prefill.tokens, **self.prefill.report()},
        }


@dataclass(frozen=True)
class Work:
    """What a model's tokens cost at least, to compare with what the machine can do.

    Attributes:
        weight_bytes: read by each step.
        kv_bytes: read by each sequence's step for each token of its context.
        ops: of the layers' matrices for each token; a product and its sum are two.
        head_ops: of the logits of a token that is sampled after.
    """

    weight_bytes: int
    kv_bytes: int
    ops: int
    head_ops: int

    @classmethod
    def of(cls, model: LoadedModel) -> Work:
        weights = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(model.state)}
        if not model.config.tie_embeddings:
            # Only the rows of the step's tokens are read.
            del weights["embed", "weight"]
        one_token = KVLayout(1, layers_per_page=model.config.num_layers)
        layers = [w for path, w in weights.items() if path[0] == "layers" and len(w.shape) == 2]
        return cls(
            weight_bytes=sum(w.nbytes for w in weights.values()),
            kv_bytes=page_bytes(model.config, one_token, model.kv_format),
            ops=2 * sum(w.shape[0] * w.shape[1] for w in layers),
            head_ops=2 * model.config.vocab_size * model.config.hidden_size,
        )


def measure(
    llm: LLM, batch_sizes: Sequence[int], *, steps: int, input_len: int, num_iters: int
) -> Latency:
    """Runs every case in turn, `num_iters` times after one that does not count.

    Raises:
        InvalidRequestError: a case does not fit the context.
    """
    decode: dict[int, list[float]] = {n: [] for n in batch_sizes}
    prefill: list[float] = []
    total = (num_iters + 1) * (len(decode) + 1)
    with tqdm(total=total, desc="measuring", unit="run", dynamic_ncols=True) as bar:
        for run in range(num_iters + 1):
            prefill.append(prefill_seconds(llm, input_len, seed=run))
            bar.update()
            for n, runs in decode.items():
                runs.append(decode_seconds(llm, n, steps, seed=run))
                bar.update()
    times = {n: Times(n, runs[1:]) for n, runs in decode.items()}
    return Latency(times, Times(input_len, prefill[1:]))


def decode_seconds(llm: LLM, streams: int, steps: int, *, seed: int) -> float:
    """Seconds of one decode step of `streams` sequences.

    Prompts, and what begins and ends a run, are in the difference of two runs no more.
    """
    shorter = _seconds(llm, streams, PROMPT_LEN, HEAD_START, 2 * seed)
    longer = _seconds(llm, streams, PROMPT_LEN, HEAD_START + steps, 2 * seed + 1)
    return (longer - shorter) / steps


def prefill_seconds(llm: LLM, length: int, *, seed: int) -> float:
    """Seconds from a prompt of `length` tokens to the first output token."""
    return _seconds(llm, 1, length, 1, seed)


def _seconds(llm: LLM, count: int, input_len: int, output_len: int, seed: int) -> float:
    prompts = random_prompts(llm.tokenizer, count, input_len, seed)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start
