"""What running decodes feel of long prompts: one engine, against prefill and decode apart.

    python docs/benchmarks/apart.py [--rounds 3]

STREAMS requests decode while a prompt of LONG tokens arrives every EVERY seconds. Each case runs
in processes of its own, all cases in turn, ROUNDS times; told is the median of the rounds. Where
cores are given, a process is bound to them and its kernels have as many threads. For apart.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from statistics import median

MODEL, STREAMS, LONG, EVERY, SECONDS = "smollm2-135m-instruct", 8, 1024, 4.0, 32.0
SIZES = {"max_model_len": 2048, "max_num_seqs": 16, "seq_buckets": [16], "background": False}
ALL = sorted(os.sched_getaffinity(0))
CASES = {
    "no long prompts": {"every": None},
    "one engine": {},
    "one engine, 512 tokens beside decodes": {"options": {"mixed_prefill_tokens": 512}},
    "apart by shm, both on all cores": {"worker": ALL},
    "apart by shm, half of the cores each": {"cores": ALL[::2], "worker": ALL[1::2]},
    "apart by tcp, half of the cores each": {
        "cores": ALL[::2],
        "worker": ALL[1::2],
        "address": "tcp://127.0.0.1:0",
    },
    "apart in memory": {"options": {"prefill_from": "memory"}},
    "one engine on half of the cores": {"cores": ALL[::2]},
}


@contextmanager
def worker(cores: list[int], address: str):
    """`llmjax prefill` on these cores; gives its address."""
    command = [sys.executable, "-m", "llmjax_serving.cli", "prefill", MODEL, "--listen", address]
    command += ["--threads", str(len(cores)), "--max-model-len", str(SIZES["max_model_len"])]
    command += ["--max-num-seqs", "16", "--seq-buckets", "16", "--no-background"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    try:
        yield next(line.split()[1] for line in process.stdout if line.startswith("Ready: "))
    finally:
        process.kill()
        process.wait()


async def measure(engine, every: float | None) -> dict[str, list[float]]:
    """Seconds between the tokens of running streams, and to the first one of long prompts."""
    from llmjax import SamplingParams
    from llmjax.bench.throughput import random_prompts

    engine.start()
    gaps: list[float] = []
    firsts: list[float] = []
    long = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    endless = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)

    async def stream(i: int, prompt: list[int]) -> None:
        last = None
        async for output in engine.generate(f"s{i}", prompt, endless):
            now, count = time.perf_counter(), len(output.outputs[0].token_ids)
            if last is not None and is_measured:
                gaps.extend([(now - last) / count] * count)
            last = now

    async def visit(i: int, prompt: list[int]) -> None:
        began = time.perf_counter()
        stream = engine.generate(f"v{i}", prompt, long)
        async for _ in stream:
            firsts.append(time.perf_counter() - began)
            break
        await stream.aclose()

    is_measured = False
    prompts = random_prompts(engine.tokenizer, STREAMS, 64)
    streams = [asyncio.create_task(stream(i, p)) for i, p in enumerate(prompts)]
    await asyncio.sleep(2)
    is_measured, visits = True, []
    began = time.perf_counter()
    while time.perf_counter() < began + SECONDS and not any(s.done() for s in streams):
        if every is not None:
            (prompt,) = random_prompts(engine.tokenizer, 1, LONG, seed=100 + len(visits))
            visits.append(asyncio.create_task(visit(len(visits), prompt)))
        await asyncio.sleep(every or 1.0)
    is_measured = False
    for task in streams:
        task.cancel()
    await asyncio.gather(*visits, *streams, return_exceptions=True)
    failed = engine.metrics.totals()["prefill_jobs_failed_total"]
    assert not failed, f"{failed} prompts were computed here"
    await engine.drain(5)
    return {"gaps": gaps, "firsts": firsts}


def run_case(name: str) -> None:
    """In a process of its own, bound before anything counts cores."""
    case = CASES[name]
    cores = case.get("cores", ALL)
    os.sched_setaffinity(0, cores)

    from llmjax.config import EngineConfig
    from llmjax.engine.async_engine import AsyncEngine

    def serve(**more) -> None:
        options = {**SIZES, "threads": len(cores), **case.get("options", {}), **more}
        engine = AsyncEngine(EngineConfig.of(MODEL, **options))
        print(json.dumps(asyncio.run(measure(engine, case.get("every", EVERY)))))
        engine.close()

    if "worker" not in case:
        serve()
        return
    with worker(case["worker"], case.get("address", "shm://bench-apart")) as address:
        serve(prefill_from=address)


def at(values: list[float], share: float) -> float:
    return 1e3 * sorted(values)[min(len(values) - 1, int(share * len(values)))]


def row(result: dict[str, list[float]]) -> list[float]:
    gaps, firsts = result["gaps"], result["firsts"]
    told = [len(gaps) / SECONDS, *(at(gaps, share) for share in (0.5, 0.95, 0.99, 1.0))]
    return [*told, at(firsts, 0.5) if firsts else 0.0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=CASES, help="run one, in this process")
    args = parser.parse_args()
    if args.case:
        run_case(args.case)
        return
    rows: dict[str, list[list[float]]] = {name: [] for name in CASES}
    for _ in range(args.rounds):
        for name in CASES:
            done = subprocess.run(
                [sys.executable, __file__, "--case", name], stdout=subprocess.PIPE, check=True
            )
            rows[name].append(row(json.loads(done.stdout.splitlines()[-1])))
    print("| | tokens/s | p50 | p95 | p99 | longest | first token of a prompt |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, rounds in rows.items():
        each = [median(column) for column in zip(*rounds, strict=True)]
        cells = [f"{value:.0f}" if i in (0, 5) else f"{value:.1f}" for i, value in enumerate(each)]
        print("|", " | ".join([name, *cells]), "|")


if __name__ == "__main__":
    main()
