"""cpu.md and cpu.png from cpu.json, which compare.py measured."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
OURS, LLAMACPP, VLLM, TRANSFORMERS = SIDES = "llmjax", "llama.cpp", "vLLM", "transformers"
FIRST = "smollm2-135m-instruct"
TITLES = {
    FIRST: "SmolLM2 135M, Q4_1 (vLLM, transformers: bfloat16)",
    "gemma-3-270m": "Gemma 3 270M, Q4_K_M",
    "qwen2.5-coder-0.5b-instruct": "Qwen2.5 Coder 0.5B, Q4_K_M",
}
_K_QUANTS = {"decode 1": {LLAMACPP: 1.3}, "decode 16": {LLAMACPP: 2}, "prefill 512": {LLAMACPP: 2}}
GOALS = {
    FIRST: {
        "decode 1": {LLAMACPP: 1.8, VLLM: 6},
        "decode 16": {LLAMACPP: 3.5, VLLM: 2.2},
        "decode 32": {LLAMACPP: 4.5, VLLM: 2.3},
        "prefill 512": {LLAMACPP: 5, VLLM: 2},
    },
    "gemma-3-270m": _K_QUANTS,
    "qwen2.5-coder-0.5b-instruct": _K_QUANTS,
}
HTTP_GOAL = 2.5
BY_HAND = "## What bounds it"
"""From here on cpu.md is written by people, and kept."""


def key(case: dict[str, Any]) -> str:
    return f"decode {case['decode']}" if "decode" in case else f"prefill {case['prefill']}"


def rates(case: dict[str, Any]) -> dict[str, float]:
    """Tokens a second of each side, by the median of its runs."""
    tokens = case.get("decode") or case["prefill"]
    return {side: tokens / median(runs) for side, runs in case["seconds"].items()}


def shares(case: dict[str, Any], work: dict[str, int], limits: dict[str, Any]) -> tuple[float, ...]:
    """Of the machine's read bandwidth and of its 8-bit operations, what llmjax makes use of."""
    rows = case.get("decode") or case["prefill"]
    sampled, contexts = (rows, rows * case["context"]) if "decode" in case else (1, rows)
    seconds = median(case["seconds"][OURS])
    read = work["weight_bytes"] + contexts * work["kv_bytes"]
    ops = rows * work["ops"] + sampled * work["head_ops"]
    return read / seconds / limits["read"], ops / seconds / limits["int8"]


def table(header: list[str], rows: list[list[str]]) -> str:
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def model_table(name: str, measured: dict[str, Any], limits: dict[str, Any]) -> str:
    peers = [side for side in measured["cases"][0]["seconds"] if side != OURS]
    with_goal = {peer for goals in GOALS[name].values() for peer in goals}
    header = ["tokens a second", OURS]
    for peer in peers:
        header += [peer, "ratio", *(["goal"] if peer in with_goal else [])]
    rows = []
    for case in measured["cases"]:
        got, goals = rates(case), GOALS[name].get(key(case), {})
        unit = "stream" if case.get("decode") == 1 else "streams"
        title = f"decode, {case['decode']} {unit}" if "decode" in case else key(case)
        row = [title, f"**{got[OURS]:,.0f}**"]
        for peer in peers:
            goal = f"{goals[peer]:g}" if peer in goals else ""
            row += [f"{got[peer]:,.0f}", f"**{got[OURS] / got[peer]:.1f}**"]
            row += [goal] if peer in with_goal else []
        read, ops = shares(case, measured["work"], limits)
        rows.append([*row, f"{read:.0%}", f"{ops:.0%}"])
    return table([*header, "of read", "of int8"], rows)


def http_table(runs: dict[str, list[dict[str, Any]]]) -> str:
    def middle(side: str, *path: str) -> float:
        values: list[Any] = runs[side]
        for name in path:
            values = [value[name] for value in values]
        return median(values)

    wanted = {
        "output tokens a second": ("output_tokens_per_second",),
        "requests a second": ("requests_per_second",),
        "first token, p50 ms": ("ttft_ms", "p50"),
        "first token, p99 ms": ("ttft_ms", "p99"),
        "between tokens, p50 ms": ("itl_ms", "p50"),
        "between tokens, p99 ms": ("itl_ms", "p99"),
    }
    rows = [
        [title, *(f"{middle(side, *path):,.{1 if 'requests' in title else 0}f}" for side in runs)]
        for title, path in wanted.items()
    ]
    rows.append(["failed", *(str(sum(run["failed"] for run in runs[side])) for side in runs)])
    best = max(middle(side, "output_tokens_per_second") for side in runs if side != OURS)
    ratio = middle(OURS, "output_tokens_per_second") / best
    said = f"**{ratio:.1f} times** the better peer's output tokens a second (goal {HTTP_GOAL})."
    return table(["", *runs], rows) + "\n\n" + said


def text(results: dict[str, Any]) -> str:
    limits, first = results["limits"], results["models"][FIRST]
    versions = ", ".join(about["version"] for about in list(first["about"].values())[1:])
    parts = [
        "# On a CPU, beside llama.cpp and vLLM",
        f"""    make bench-compare{" VLLM=1" if VLLM in first["about"] else ""}

{results["machine"]}; {versions}; llama.cpp's server from the wheel xllamacpp
{results["versions"]["xllamacpp"]}, which is built for AVX2 where the one in process has all that
this CPU has. Medians of {results["rounds"]} rounds; in each round every side is measured in turn,
while the others are stopped. Written by [report.py](report.py) from [cpu.json](cpu.json).

A decode step is timed among streams that begin with 16 tokens. llama.cpp in process gets whole
batches through its own API, its default flash attention, and samples nothing. vLLM runs as it does
by itself, compiled, and in process without a second process for its engine, which here is faster;
its weights, and those of transformers' `generate`, are the same in bfloat16. *Of read* is what
must be read, weights and the streams' keys and values, over the time it took, as a share of the
{limits["read"] / 1e9:.1f} GB/s at which {limits["threads"]} threads read memory; *of int8* the
matrices' operations as a share of {limits["int8"] / 1e12:.2f} Top/s ({limits["instruction_set"]}),
measured in the same run.

![Decoding SmolLM2, and the speed of llmjax over llama.cpp](cpu.png)""",
    ]
    for name, measured in results["models"].items():
        parts.append(f"## {TITLES[name]}\n\n{model_table(name, measured, limits)}")
    parts.append(
        "## 32 chats at a time over HTTP, SmolLM2\n\n64 chats a round of `llmjax bench serve`, "
        f"prompts of 128 tokens, answers of 64.\n\n{http_table(results['http'])}"
    )
    return "\n\n".join(parts) + "\n"


def plot(results: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    cases = [case for case in results["models"][FIRST]["cases"] if "decode" in case]
    streams = [case["decode"] for case in cases]
    for side in cases[0]["seconds"]:
        left.plot(streams, [rates(case)[side] for case in cases], marker="o", label=side)
    left.set_xscale("log", base=2)
    left.set_xticks(streams, map(str, streams))
    left.set(xlabel="streams", ylabel="tokens a second", ylim=0, title="Decoding SmolLM2 135M")
    left.legend(frameon=False)
    left.grid(alpha=0.3)
    names, values, goals = [], [], []
    for model, measured in results["models"].items():
        for case in measured["cases"]:
            goal = GOALS[model].get(key(case), {}).get(LLAMACPP)
            if goal:
                got = rates(case)
                names.append(f"{model.split('-')[0]}, {key(case)}")
                values.append(got[OURS] / got[LLAMACPP])
                goals.append(goal)
    places = range(len(names))
    right.barh(places, values, color="C0", label="measured")
    right.scatter(goals, places, marker="|", s=260, color="k", label="goal", zorder=3)
    right.set_yticks(places, names)
    right.invert_yaxis()
    right.set(xlabel="times llama.cpp's speed", title="llmjax over llama.cpp")
    right.legend(frameon=False)
    right.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=110)


def write(results: dict[str, Any]) -> None:
    page = HERE / "cpu.md"
    _, mark, by_hand = page.read_text().partition(BY_HAND) if page.exists() else ("", "", "")
    page.write_text(text(results) + ("\n" + mark + by_hand if mark else ""))
    plot(results, HERE / "cpu.png")
    print(page.read_text())


if __name__ == "__main__":
    write(json.loads((HERE / "cpu.json").read_text()))
