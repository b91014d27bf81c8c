"""What it costs to bind outputs: `python docs/benchmarks/masks.py [MODEL]`.

STREAMS sequences decode, of which nothing is asked, and then the same number whose output is bound
to a JSON schema, by turns, ROUNDS times: a list of strings, or of records.
For docs/benchmarks/masks.md, on a machine that does nothing else.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from statistics import median

from llmjax import LLM, SamplingParams, StructuredOutputs
from llmjax.bench.throughput import random_prompts

MODEL, STREAMS, PROMPT_LEN, ROUNDS = "smollm2-135m-instruct", 32, 16, 15
HEAD_START, STEPS = 8, 64
"""Tokens that do not count, and those that do."""
STRING = {"type": "string", "minLength": 40}
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS = {
    "free": None,
    "strings": {"type": "array", "items": STRING, "minItems": 1000},
    "records": {"type": "array", "items": RECORD, "minItems": 1000},
}
"""None of them can end within a run."""


@dataclass
class Run:
    """Attributes:
    seconds, steps, tokens: of all streams together.
    """

    seconds: float
    steps: int
    tokens: int

    def __sub__(self, other: Run) -> Run:
        return Run(
            self.seconds - other.seconds, self.steps - other.steps, self.tokens - other.tokens
        )


def generate(llm: LLM, schema: dict | None, length: int, seed: int) -> Run:
    bound = StructuredOutputs(json=schema) if schema is not None else None
    params = SamplingParams(
        temperature=1.0, seed=seed, max_tokens=length, ignore_eos=True, structured_outputs=bound
    )
    prompts = random_prompts(llm.tokenizer, STREAMS, PROMPT_LEN, seed)
    before, began = llm.engine.num_steps, time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = [len(output.outputs[0].token_ids) for output in outputs]
    assert tokens == [length] * STREAMS, "a stream has ended"
    return Run(seconds, llm.engine.num_steps - before, sum(tokens))


def measure(llm: LLM, schema: dict | None, seed: int) -> Run:
    """Of the tokens behind the head start: what begins a run is in both runs."""
    shorter = generate(llm, schema, HEAD_START, seed)
    return generate(llm, schema, HEAD_START + STEPS, seed) - shorter


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else MODEL
    sizes = {"max_num_seqs": STREAMS, "seq_buckets": (8, STREAMS), "max_model_len": 512}
    runs: dict[str, list[Run]] = {name: [] for name in SCHEMAS}
    with LLM(model, background=False, enable_prefix_caching=False, **sizes) as llm:
        for number in range(ROUNDS + 1):  # the first one warms up
            for name, schema in SCHEMAS.items():
                runs[name].append(measure(llm, schema, number))
                print(number, name, runs[name][-1], file=sys.stderr, flush=True)
    print("| outputs | ms a step | over free | tokens/s | over free |")
    print("| :-- | --: | --: | --: | --: |")
    base: tuple[float, float] | None = None
    for name, (_, *counted) in runs.items():
        step = median(run.seconds / run.steps for run in counted)
        rate = median(run.tokens / run.seconds for run in counted)
        base = base or (step, rate)
        cells = f"{1e3 * step:.2f}", f"{step / base[0] - 1:+.1%}", f"{rate:,.0f}"
        print("|", " | ".join((name, *cells, f"{rate / base[1] - 1:+.1%}")), "|")


if __name__ == "__main__":
    main()
