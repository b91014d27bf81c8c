"""A real trace on a real model whose pages are far too few: nothing that is said changes.

    python docs/benchmarks/live_trace.py TRACE.csv [--requests 1000]

Replays the Azure conversation trace (ContextTokens, GeneratedTokens) with lengths divided by
SCALE on SmolLM2, all requests at hand from the start, under every policy, with and without
host memory, in a pool of half of what the running sequences would fill, without the forecast that
keeps preemptions rare. Compares every token with that of a roomy engine that remembers nothing,
and the accounts of pages at the end.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import time

from llmjax import LLM, SamplingParams
from llmjax.bench.throughput import random_prompts

MODEL, SCALE, STREAMS = "smollm2-135m-instruct", 8, 32
SIZES = {"max_model_len": 1024, "max_num_seqs": STREAMS, "seq_buckets": (STREAMS,)}
POLICIES = ("fcfs", "priority", "lpm")


def load(llm: LLM, path: str, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, a third of which begin with what an earlier one had, and their lengths."""
    rng, prompts, params = random.Random(0), [], []
    with open(path) as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(count), strict=False)]
    for row in rows:
        length = max(1, min(int(row["ContextTokens"]) // SCALE, 700))
        output = max(1, min(int(row["GeneratedTokens"]) // SCALE, 200))
        (prompt,) = random_prompts(llm.tokenizer, 1, length, seed=len(prompts))
        if prompts and rng.random() < 1 / 3:
            shared = rng.choice(prompts)[: rng.randrange(length)]
            prompt = shared + prompt[len(shared) :]
        prompts.append(prompt)
        params.append(SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))
    return prompts, params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--requests", type=int, default=1000)
    args = parser.parse_args()
    with LLM(MODEL, enable_prefix_caching=False, **SIZES) as llm:
        prompts, params = load(llm, args.trace, args.requests)
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    lengths = sorted(len(p) + q.max_tokens for p, q in zip(prompts, params, strict=True))
    pages = max(sum(n // 16 + 1 for n in lengths[len(lengths) // 2 :][:STREAMS]) // 2, 64)
    priorities = [random.Random(i).randrange(3) for i in range(len(prompts))]
    print(f"{len(prompts)} requests, {sum(map(len, prompts)):,} prompt tokens, {pages} pages")
    print("| policy | host | seconds | preempted | saved | loaded | hits | different |")
    wrong = 0
    for policy in POLICIES:
        for swap in (0.0, 2.0):
            with LLM(
                MODEL,
                scheduling_policy=policy,
                swap_space=swap,
                forecast_margin=None,  # which would keep preemptions away
                num_gpu_blocks_override=pages,
                **SIZES,
            ) as llm:
                more = {"priority": priorities} if policy == "priority" else {}
                began = time.perf_counter()
                outputs = llm.generate(prompts, params, **more)
                took = time.perf_counter() - began
                differ = sum(
                    o.outputs[0].token_ids != e for o, e in zip(outputs, expected, strict=True)
                )
                stats = llm.engine.stats()
                llm.engine.scheduler.check_balance()
                wrong += differ + stats.pages_used
                hits = stats.prefix_hits / max(1, stats.prefix_queries)
                row = (policy, "swap" if swap else "none", f"{took:.0f}", stats.num_preemptions)
                row += (stats.pages_saved, stats.pages_loaded, f"{hits:.0%}", differ)
                print("|", " | ".join(map(str, row)), "|", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
