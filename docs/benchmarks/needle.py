"""What a model still knows of a text longer than its KV budget: for long-context.md.

`python docs/benchmarks/needle.py` writes the tables into docs/benchmarks/long-context.md and draws
long-context.png. Two tests, with everything kept and with each policy and budget:

- Needle: a code is said once in made-up news, at some depth, and asked for at the end; a text has
  the question at its beginning too, or not.
- Perplexity of WikiText-2 (`LLMJAX_SHARED`, by default ../shared) as one text, by position.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import time
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from llmjax import LLM, SamplingParams

HERE = Path(__file__).parent
SHARED = Path(os.environ.get("LLMJAX_SHARED", HERE.parents[1] / ".." / "shared"))
BUDGETS = (512, 1024)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 0.9)
PARTS = (0, 512, 1024, 2048, 4096, 8192, 12288)
"""Positions between which perplexity is told apart."""

TOWNS = ["Aldbury", "Brenford", "Calder", "Dunmore", "Elstow", "Farley", "Garston", "Hexham"]
PEOPLE = ["the mayor", "a baker", "the choir", "a young teacher", "the fire brigade", "two farmers"]
DEEDS = [
    "opened a small exhibition about old maps",
    "asked for a new bridge over the river",
    "won the regional prize for the best garden",
    "spoke about the price of wool",
    "repaired the clock of the town hall",
    "planted forty apple trees along the road",
    "sold bread at half the price until noon",
]
TIMES = ["On Monday", "Last week", "In the early spring", "After the storm", "Before the harvest"]


def news(rng: random.Random) -> str:
    town, person = rng.choice(TOWNS), rng.choice(PEOPLE)
    return f"{rng.choice(TIMES)} {person} of {town} {rng.choice(DEEDS)}."


def needle_prompt(llm: LLM, length: int, depth: float, announced: bool, seed: int):
    """Token ids of about `length`, and the code to be found."""
    rng = random.Random(seed)
    town, code = rng.choice(TOWNS), f"{rng.randrange(10000, 100000)}"
    encode = llm.tokenizer.encode
    start = "These are short news from several towns.\n"
    if announced:
        start += f"Remember the access code of the {town} station: it will be asked for.\n"
    needle = f" The access code of the {town} station is {code}."
    end = f"\n\nQuestion: What is the access code of the {town} station?\n"
    end += f"Answer: The access code of the {town} station is"
    sentences: list[str] = []
    room = length - len(encode(start + needle + end))
    used = 0
    while used < room:
        sentences.append(" " + news(rng))
        used += len(encode(sentences[-1]))
    sentences.insert(round(depth * len(sentences)), needle)
    return encode(start + "".join(sentences) + end), code


def found(llm: LLM, length: int, announced: bool, seeds: int) -> list[float]:
    """The share of codes that are said, at each depth."""
    params = SamplingParams(temperature=0, max_tokens=10)
    shares = []
    for depth in DEPTHS:
        cases = [needle_prompt(llm, length, depth, announced, seed) for seed in range(seeds)]
        outputs = llm.generate([ids for ids, _ in cases], params, use_tqdm=False)
        texts = [re.sub(r"\D", "", output.outputs[0].text) for output in outputs]
        hits = [text.startswith(code) for text, (_, code) in zip(texts, cases, strict=True)]
        shares.append(sum(hits) / len(hits))
    return shares


def losses(llm: LLM, ids: list[int]) -> np.ndarray:
    """Of each token but the first the negative log-likelihood."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    rows = llm.generate(ids[: llm.engine.max_model_len - 1], params)[0].prompt_logprobs
    return -np.array([row[token].logprob for row, token in zip(rows[1:], ids[1:], strict=False)])


def perplexities(loss: np.ndarray) -> list[float | None]:
    parts = [loss[a:b] for a, b in pairwise(PARTS)]
    return [float(np.exp(part.mean())) if len(part) > 100 else None for part in parts]


def measure(args: argparse.Namespace, text: str) -> dict[str, dict]:
    sides = {"all kept": {}}
    for policy in ("streaming", "snapkv"):
        for budget in BUDGETS:
            sides[f"{policy}, {budget:,}"] = {"kv_eviction": policy, "kv_budget": budget}
    for name, options in sides.items():
        length = PARTS[-1] if options.get("kv_eviction") == "streaming" else 8192
        began = time.perf_counter()
        with LLM(args.model, max_model_len=length, max_num_seqs=4, **options) as llm:
            loss = losses(llm, llm.tokenizer.encode(text)) if text else np.zeros(0)
            options["perplexity"] = perplexities(loss)
            for announced in (False, True):
                shares = found(llm, args.length, announced, args.seeds)
                options["announced" if announced else "asked"] = shares
        print(f"{name}: {options} {time.perf_counter() - began:.0f} s", flush=True)
    return sides


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(sides: dict[str, dict], args: argparse.Namespace) -> str:
    depths = [f"{depth:.0%}" for depth in DEPTHS]
    parts = []
    for key, what in (("asked", "asked for at the end"), ("announced", "announced as well")):
        rows = [[name, *(f"{share:.0%}" for share in side[key])] for name, side in sides.items()]
        title = f"Codes found of {args.seeds}, in {args.length:,} tokens, {what}, by depth:"
        parts.append(f"{title}\n\n{table(['', *depths], rows)}")
    spans = [f"to {end:,}" for end in PARTS[1:]]
    rows = [
        [name, *("" if p is None else f"{p:.2f}" for p in side["perplexity"])]
        for name, side in sides.items()
    ]
    parts.append(f"Perplexity of WikiText-2 by position:\n\n{table(['', *spans], rows)}")
    return "\n\n".join(parts)


def draw(sides: dict[str, dict]) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4))
    colours = {"all kept": "black", "streaming": "tab:blue", "snapkv": "tab:orange"}
    for name, side in sides.items():
        policy, _, budget = name.partition(", ")
        style = {"512": ":", "1,024": "--"}.get(budget, "-")
        look = {"color": colours[policy], "linestyle": style, "marker": ".", "label": name}
        axes[0].plot(DEPTHS, side["asked"], **look)
        axes[1].plot(DEPTHS, side["announced"], **look)
        points = [(e, p) for e, p in zip(PARTS[1:], side["perplexity"], strict=True) if p]
        axes[2].plot(*zip(*points, strict=True), **look) if points else None
    for axis, title in zip(axes, ("asked for at the end", "announced as well"), strict=False):
        axis.set(title=f"Codes found, {title}", xlabel="depth of the code", ylim=(-0.05, 1.05))
    axes[2].set(title="Perplexity of WikiText-2", xlabel="up to position", xscale="log")
    axes[2].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(HERE / "long-context.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--length", type=int, default=2500, help="tokens of a text with a code")
    parser.add_argument("--seeds", type=int, default=2, help="texts at each depth")
    args = parser.parse_args()
    source = SHARED / "wikitext-2" / "test.txt"
    source = source if source.exists() else SHARED / "data" / "wikitext-2" / "test.txt"
    text = source.read_text()[:80_000] if source.exists() else ""
    sides = measure(args, text)
    draw(sides)
    page = HERE / "long-context.md"
    before, _, rest = page.read_text().partition("<!-- figures -->\n")
    _, _, after = rest.partition("<!-- end of figures -->")
    figures = f"<!-- figures -->\n{report(sides, args)}\n\n<!-- end of figures -->"
    page.write_text(before + figures + after)


if __name__ == "__main__":
    main()
