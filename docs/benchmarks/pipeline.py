"""How long stages wait for each other: `python docs/benchmarks/pipeline.py [STAGES] [STREAMS]`.

Decodes STREAMS sequences of SmolLM2 in STAGES stages, notes when each stage is done with each step
and says which share of the time each had nothing to do: as seen, and by the plan alone, which is
what the steps' own times come to where only the rules of the pipeline make anyone wait
(`llmjax.parallel.stages.idle_shares`), without and with the time that the host takes between a
step's end and the next one's begin.

Without GPUs the stages are virtual devices of one CPU: they share its cores, so a stage takes
longer while another works, and what is seen is indicative only. What the plan says holds anywhere
for the seconds that it is given.
"""

from __future__ import annotations

import sys
import threading
import time
from queue import SimpleQueue
from statistics import median

import jax

from llmjax import LLM, SamplingParams
from llmjax.bench.throughput import random_prompts
from llmjax.parallel.stages import idle_shares

STAGES = int(sys.argv[1]) if len(sys.argv) > 1 else 2
STREAMS = int(sys.argv[2]) if len(sys.argv) > 2 else 16
MODEL, PROMPT_LEN, STEPS = "smollm2-135m-instruct", 16, 48


class Watch:
    """When each stage is sent each step, and when it is done with it."""

    def __init__(self, stages: int):
        self.sent: list[list[float]] = [[] for _ in range(stages)]
        self.done: list[list[float]] = [[] for _ in range(stages)]
        self._queues: list[SimpleQueue] = [SimpleQueue() for _ in range(stages)]
        for stage in range(stages):
            threading.Thread(target=self._wait, args=(stage,), daemon=True).start()

    def around(self, stage: int, program):
        def run(*args):
            self.sent[stage].append(time.perf_counter())
            out = program(*args)
            # Of the state only what is not donated to the next step.
            self._queues[stage].put(out[1])
            return out

        return run

    def _wait(self, stage: int) -> None:
        while True:
            out = self._queues[stage].get()
            jax.block_until_ready(out)
            self.done[stage].append(time.perf_counter())

    def spans(self) -> list[list[tuple[float, float]]]:
        """Of each stage, when it began and ended each step: it begins when it has been sent the
        step, the stage before is done with it, and it is itself done with the one before."""
        spans: list[list[tuple[float, float]]] = []
        for stage, ends in enumerate(self.done):
            begins = []
            for step, sent in enumerate(self.sent[stage][: len(ends)]):
                before = ends[step - 1] if step else sent
                given = self.done[stage - 1][step] if stage else sent
                begins.append(min(max(sent, before, given), ends[step]))
            spans.append(list(zip(begins, ends, strict=True)))
        return spans


def main() -> None:
    jax.config.update("jax_num_cpu_devices", STAGES)
    with LLM(
        MODEL,
        pipeline_parallel_size=STAGES,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=STREAMS,
        max_num_batched_tokens=256,
        token_buckets=(256,),
        seq_buckets=(STREAMS // STAGES, STREAMS),
        num_gpu_blocks_override=STREAMS * 16 + 16,
        background=False,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
        prompts = random_prompts(llm.tokenizer, STREAMS, PROMPT_LEN)
        llm.generate(prompts, params, use_tqdm=False)
        watch = Watch(STAGES)
        programs = llm.engine.runner.programs
        for bucket in llm.engine.buckets.ready:
            stages = programs[bucket].step.programs
            stages[:] = [watch.around(i, program) for i, program in enumerate(stages)]
        llm.generate(prompts, params, use_tqdm=False)
        while any(len(done) < len(watch.sent[0]) for done in watch.done):
            time.sleep(0.01)
    report(watch.spans())


def report(spans: list[list[tuple[float, float]]]) -> None:
    # Prompts at the beginning and sequences that end at the end are no steady state.
    count = len(spans[0])
    steady = slice(count // 4, count * 3 // 4)
    spans = [stage[steady] for stage in spans]
    seconds = [[end - begin for begin, end in stage] for stage in spans]
    seen = []
    for stage, taken in zip(spans, seconds, strict=True):
        seen.append(1 - sum(taken) / (stage[-1][1] - stage[0][0]))
    last, first = spans[-1], spans[0]
    turns = [first[i + STAGES][0] - last[i][1] for i in range(len(first) - STAGES)]
    turn = max(0.0, median(turns))
    steps = list(zip(*seconds, strict=True))
    where = f"{STAGES} devices ({jax.devices()[0].device_kind})"
    print(f"{STREAMS} sequences, {len(steps)} steps of {STREAMS // STAGES}, on {where}")
    print(f"a step takes {' and '.join(f'{1e3 * median(s):.1f}' for s in seconds)} ms")
    print(f"from a step's end to the begin of the next of its sequences: {1e3 * turn:.2f} ms")
    rows = {
        "seen": seen,
        "by the plan": idle_shares(steps, in_flight=STAGES),
        "by the plan, with the host's turn": idle_shares(steps, in_flight=STAGES, turn=turn),
        "one step at a time": idle_shares(steps, in_flight=1),
    }
    for name, shares in rows.items():
        print(f"{name:36}" + "  ".join(f"stage {i}: {s:6.1%}" for i, s in enumerate(shares)))


if __name__ == "__main__":
    main()
