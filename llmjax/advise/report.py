"""An advice as a table with its reasons, and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from .advice import Advice, Candidate
from .estimate import Estimate

WIDTH = 100
"""Of lines of text."""
HEADER = (
    *("", "GPUs", "weights GB", "KV B/token", "fit", "batch", "decode ms", "prompt ms", "mixed ms"),
    *("answer s", "alone s", "tokens/s", "a GPU", "perplexity", "llmjax"),
)
WORDS = (0, *range(HEADER.index("perplexity"), len(HEADER)))
"""Columns that begin on the left."""


def table(advice: Advice) -> str:
    """For people."""
    rows = [HEADER, *(_row(candidate, advice) for candidate in advice.candidates)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in WORDS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    reasons = [_wrapped(reason, "- ") for reason in advice.reasons]
    return "\n".join([*_heading(advice), "", *reasons, "", *lines, "", _legend(advice)])


def _wrapped(text: str, bullet: str = "") -> str:
    # Commands stay whole: their flags and paths have hyphens.
    whole = {"break_long_words": False, "break_on_hyphens": False}
    indent = {"initial_indent": bullet, "subsequent_indent": " " * len(bullet)}
    return textwrap.fill(text, WIDTH, **whole, **indent)  # type: ignore[arg-type]


def _heading(advice: Advice) -> list[str]:
    asked = advice.question
    limit = "no limit" if asked.p99 is None else f"{asked.p99:g} s"
    return [
        _wrapped(
            f"{advice.model.name} on {asked.gpu}: {asked.input_len:,} tokens in, "
            f"{asked.output_len:,} out, p99 of a whole answer: {limit}; goal {asked.goal}, "
            f"accuracy {asked.accuracy}"
        ),
        f"Advice: {conclusion(advice)}",
    ]


def conclusion(advice: Advice) -> str:
    """The advice in one line."""
    best = advice.best
    if best is None or best.estimate is None:
        return "none"
    chosen, drafting = best.estimate, advice.speculation
    devices = "" if chosen.gpus == 1 else f" on {chosen.gpus} GPUs"
    pays = drafting is not None and drafting.pays
    return (
        f"{best.name}{devices}, up to {chosen.batch:,} at a time, "
        f"{'with' if pays else 'without'} speculation"
    )


def _row(candidate: Candidate, advice: Advice) -> tuple[str, ...]:
    name = f"{'*' if candidate is advice.best else ' '} {candidate.scheme}, {candidate.kv_dtype}"
    perplexity = f"{_short(candidate.weights_quality.ratio)} {_short(candidate.kv_quality.ratio)}"
    memory, chosen = candidate.memory, candidate.estimate
    weights = memory.weights / 1e9
    sizes = (f"{weights:,.{2 if weights >= 1 else 3}f}", f"{memory.kv_token:,}", f"{memory.fits:,}")
    if chosen is None:
        return (name, "-", *sizes, *("-",) * 8, perplexity, "does not fit")
    return (
        *(name, str(chosen.gpus), *sizes, f"{chosen.batch:,}"),
        f"{1e3 * chosen.decode.seconds:,.2f}",
        f"{1e3 * chosen.prompt.seconds:,.2f}",
        f"{1e3 * chosen.mixed.seconds:,.2f}",
        f"{chosen.answer_s:,.2f}",
        f"{chosen.alone_s:,.2f}",
        f"{chosen.tokens_per_second:,.0f}",
        f"{chosen.per_gpu:,.0f}",
        *(perplexity, _remark(candidate, chosen)),
    )


def _short(ratio: float | None) -> str:
    return "?" if ratio is None else f"{ratio:.3f}"


def _remark(candidate: Candidate, chosen: Estimate) -> str:
    if not chosen.keeps_p99:
        return "misses p99"
    if candidate.objection is not None:
        return "not accurate enough"
    return "serves it" if candidate.served.today else "not yet"


def _legend(advice: Advice) -> str:
    asked = advice.question
    text = (
        f"Seconds are a roofline's, not measured: {asked.memory_efficiency:g} of the bandwidth, "
        f"{asked.compute_efficiency:g} of the peak, {asked.step_overhead_ms:g} ms a step "
        f"({advice.figures.source}). An answer is one of a full batch of requests that are all "
        "alike, each beginning as another ends, whose prompts are computed beside the decodes; "
        "`llmjax simulate` plays loads that are not. "
        "Perplexity: of weights and of KV, times that of floats on this model; ?: not measured."
    )
    return _wrapped(text)


def as_json(advice: Advice) -> dict[str, Any]:
    """The same for programs: bytes and seconds."""
    places = {id(candidate): place for place, candidate in enumerate(advice.candidates)}

    def place(candidate: Candidate | None) -> int | None:
        return None if candidate is None else places[id(candidate)]

    return {
        "advice": conclusion(advice),
        "reasons": list(advice.reasons),
        "question": asdict(advice.question),
        "model": asdict(advice.model),
        "figures": asdict(advice.figures),
        "rule": asdict(advice.rule),
        "best": place(advice.best),
        "today": place(advice.today),
        "speculation": None if advice.speculation is None else asdict(advice.speculation),
        "candidates": [_candidate_json(candidate) for candidate in advice.candidates],
    }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    chosen = candidate.estimate
    return {
        "scheme": candidate.scheme,
        "kv_dtype": candidate.kv_dtype,
        "possible": candidate.is_possible,
        "memory": asdict(candidate.memory),
        "estimate": None if chosen is None else _estimate_json(chosen),
        "weights_quality": asdict(candidate.weights_quality),
        "kv_quality": asdict(candidate.kv_quality),
        "objection": candidate.objection,
        "served": asdict(candidate.served),
    }


def _estimate_json(chosen: Estimate) -> dict[str, Any]:
    return {
        "gpus": chosen.gpus,
        "weights": asdict(chosen.machine.weights),
        "batch": chosen.batch,
        "prompt": {**asdict(chosen.prompt), "bound": chosen.prompt.bound},
        "decode": {**asdict(chosen.decode), "bound": chosen.decode.bound},
        "mixed": {**asdict(chosen.mixed), "bound": chosen.mixed.bound},
        "answer_s": chosen.answer_s,
        "alone_s": chosen.alone_s,
        "keeps_p99": chosen.keeps_p99,
        "tokens_per_second": chosen.tokens_per_second,
    }
