"""What the host does in a step beside the device's work: `python docs/benchmarks/host_loop.py`.

Runs STREAMS decodes of SmolLM2 and takes the processor time of the thread that steps, part by
part: scheduling, packing a step's inputs, dispatching it, collecting its results, committing
them, and turning tokens into text. Waiting costs none. For cpu.md.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from statistics import median

from llmjax import LLM, SamplingParams
from llmjax.bench.throughput import random_prompts

MODEL, STREAMS, PROMPT_LEN, STEPS = "smollm2-135m-instruct", 64, 16, 120


class Parts:
    """Processor seconds of each part, a list with one entry a step."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._inside: list[float] = []

    def watch(self, owner: object, name: str, part: str) -> None:
        """Adds up what a method takes, less what watched methods inside it take."""
        method = getattr(owner, name)

        def watched(*args, **kwargs):
            self._inside.append(0.0)
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                took = time.thread_time() - began
                self.seconds[part].append(took - self._inside.pop())
                if self._inside:
                    self._inside[-1] += took

        setattr(owner, name, watched)


def main() -> None:
    parts, steps = Parts(), []
    with LLM(MODEL, max_num_seqs=STREAMS, max_model_len=512, seq_buckets=(STREAMS,)) as llm:
        engine = llm.engine
        parts.watch(engine.scheduler, "schedule", "schedule")
        parts.watch(engine.runner.slots, "pack", "pack")
        parts.watch(engine.runner, "dispatch", "dispatch")
        parts.watch(engine.runner, "sample", "sample")
        parts.watch(engine.runner, "collect", "collect")
        parts.watch(engine.scheduler, "commit", "commit")
        parts.watch(llm._callers.processor, "process", "text and streaming")
        step = engine.step

        def timed():
            began = time.perf_counter()
            deltas = step()
            steps.append(time.perf_counter() - began)
            return deltas

        engine.step = timed
        prompts = random_prompts(llm.tokenizer, STREAMS, PROMPT_LEN)
        params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
    whole = median(steps[STEPS // 4 :])
    rows = {part: median(seconds[STEPS // 4 :]) for part, seconds in parts.seconds.items()}
    rows["in all"] = sum(rows.values())
    print(f"{STREAMS} streams, a step of {1e3 * whole:.1f} ms", file=sys.stderr)
    for part, seconds in rows.items():
        print(f"| {part} | {1e3 * seconds:.2f} | {seconds / whole:.1%} |")


if __name__ == "__main__":
    main()
