"""The plots and tables of docs/quantisation.md from quantise.json, which quantise.py measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from quantise_cases import GPTQMODEL, LLAMACPP, LLMCOMPRESSOR, MODELS, OURS, cases

HERE = Path(__file__).parent
PAGE = HERE.parent / "quantisation.md"
PEERS = (GPTQMODEL, LLMCOMPRESSOR, LLAMACPP)
FIRST = 16
"""Windows that every row has, unless the floats have fewer; more are the longer run."""
SPEEDS = ["decode", "prefill"]
"""Tokens a second, where they were measured."""
BEGIN, END = "<!-- producing -->", "<!-- /producing -->"
FAMILIES = {
    "int4": "C7",
    "int8": "C7",
    "gptq": "C0",
    "awq": "C1",
    "smoothquant": "C2",
    "fp8": "C3",
    "nvfp4": "C4",
    "mxfp4": "C4",
    "gguf": "C5",
}
MARKERS = {OURS: "o", GPTQMODEL: "+", LLMCOMPRESSOR: "x", LLAMACPP: "s"}

Row = dict[str, Any]


def perplexity(row: Row, windows: int) -> float:
    return float(np.exp(np.mean(row["nll"][:windows])))


def beside(ours: Row, theirs: Row, windows: int) -> tuple[float, float]:
    """How much greater our perplexity is, as a share, and the standard error of that."""
    differences = np.array(ours["nll"][:windows]) - np.array(theirs["nll"][:windows])
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    return float(np.expm1(differences.mean())), float(error)


def first_windows(rows: dict[str, Row]) -> int:
    """How many windows every row of a model is judged by."""
    return min(FIRST, len(rows["floats"]["nll"]))


def judged(rows: dict[str, Row]) -> dict[str, Row]:
    """Those that have the windows that every row has."""
    first = first_windows(rows)
    return {name: row for name, row in rows.items() if len(row.get("nll", ())) >= first}


def table(key: str, rows: dict[str, Row]) -> str:
    """Ours by method, and the peers' beside them."""
    found, first = judged(rows), first_windows(rows)
    longest = max(len(row["nll"]) for row in found.values())
    names = [case.name for case in cases(MODELS[key].group)]
    peers = [p for p in PEERS if any(f"{p} {name}" in rows for name in names)]
    header = ["", "bits", "MB", "perplexity", "KL", "same token"]
    header += [f"{longest} windows"] if longest > first else []
    header += SPEEDS if any("speed" in row for row in found.values()) else []
    lines = [[*header, *peers], [":--", *["--:"] * (len(header) + len(peers) - 1)]]
    for name in ["floats", *names]:
        row = found.get(name if name == "floats" else f"{OURS} {name}")
        theirs = [rows.get(f"{peer} {name}") for peer in peers]
        if row is None and not any(theirs):
            continue
        cells = _ours(row, first, longest) if row else []
        if row and "speed" in row:
            cells += [f"{row['speed'][name]:,.0f}" for name in SPEEDS]
        cells += [""] * (len(header) - 1 - len(cells))
        title = "floats (bfloat16)" if name == "floats" else f"`{name}`"
        lines.append([title, *cells, *(_theirs(row, other, first) for other in theirs)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ours(row: Row, first: int, longest: int) -> list[str]:
    cells = [f"{row['bits']:.2f}", f"{row['bytes'] / 1e6:.0f}", f"{perplexity(row, first):.2f}"]
    cells += [f"{mean(row['kl'][:first]):.4f}", f"{mean(row['top1'][:first]):.1%}"]
    if longest > first:
        cells.append(f"{perplexity(row, longest):.2f}" if len(row["nll"]) == longest else "")
    return cells


def _theirs(ours: Row | None, theirs: Row | None, first: int) -> str:
    """Their perplexity and divergence, and how much greater our perplexity is."""
    if theirs is None:
        return ""
    if "failed" in theirs:
        return theirs["failed"]
    if theirs.get("same_bytes_as_ours"):
        return "the same bytes"
    if len(theirs.get("nll", ())) < first:
        return ""
    text = f"{perplexity(theirs, first):.2f}, {mean(theirs['kl'][:first]):.4f}"
    if ours is None:
        return text
    windows = min(len(ours["nll"]), len(theirs["nll"]))
    more, error = beside(ours, theirs, windows)
    return f"{text} ({more:+.1%} ± {error:.1%})"


def readers_table(rows: dict[str, Row]) -> str:
    """What peers make of folders that llmjax wrote."""
    lines = [
        ["", "read by", "windows", "its perplexity", "llmjax's", "same choice"],
        [":--", ":--", "--:", "--:", "--:", "--:"],
    ]
    for name, row in rows.items():
        for answer in row.get("readers", {}).values():
            windows = len(answer["nll"])
            its, ours = perplexity(answer, windows), perplexity(row, windows)
            share = f"{answer['same_choices']:.0%}"
            shown = f"`{name.partition(' ')[2]}`"
            cells = [shown, answer["version"], str(windows), f"{its:.3f}", f"{ours:.3f}", share]
            lines.append(cells)
    if len(lines) == 2:
        return ""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(title: str, rows: dict[str, Row], file: Path) -> None:
    """Divergence by the bits of a weight, and perplexity by the size of the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    first, sides = first_windows(rows), set()
    for name, row in judged(rows).items():
        side, _, case = name.partition(" ")
        if not case or row.get("same_bytes_as_ours"):
            continue
        colour = FAMILIES[case.partition("-")[0]]
        label = side if side not in sides else None
        sides.add(side)
        kl, loss = mean(row["kl"][:first]), perplexity(row, first)
        style = {"marker": MARKERS[side], "color": colour, "ls": "", "ms": 6, "label": label}
        left.plot(row["bits"], kl, **style)
        right.plot(row["bytes"] / 1e6, loss, **style)
        if side == OURS:
            short = case.removeprefix("gguf-")
            for axes, x, y in ((left, row["bits"], kl), (right, row["bytes"] / 1e6, loss)):
                axes.annotate(short, (x, y), (3, 3), textcoords="offset points", fontsize=6)
    right.axhline(perplexity(rows["floats"], first), color="k", lw=0.8, ls=":", label="floats")
    left.set(xlabel="bits a weight of the layers, scales and all", ylabel="KL divergence")
    right.set(xlabel="MB on disk", ylabel=f"perplexity, {first} windows of 512")
    for axes in (left, right):
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
    left.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def write(results: dict[str, Any]) -> None:
    """The page's section between its marks, and a plot a model."""
    parts = []
    for key, found in results["models"].items():
        rows, model = found["rows"], MODELS[key]
        if "floats" not in rows:
            continue
        plot(model.title, rows, HERE / f"quantise-{key}.png")
        about = f"Groups of {model.group}; {found['samples']} windows calibrate, and "
        about += f"{first_windows(rows)} judge."
        image = f"![{model.title}](benchmarks/quantise-{key}.png)"
        parts += [f"### {model.title}", about, table(key, rows), image]
        readers = readers_table(rows)
        if readers:
            parts.append(f"Peers that read what llmjax wrote, {model.title}:\n\n{readers}")
    filled = f"{BEGIN}\n" + "\n\n".join(parts) + f"\n{END}"
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: filled, text, flags=re.DOTALL))


if __name__ == "__main__":
    write(json.loads((HERE / "quantise.json").read_text()))
