"""Every scheme by arithmetic, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import ConfigError
from ..simulate.device import Figures, Weights
from .advice import Advice, Candidate
from .devices import find_figures
from .estimate import MARGIN, best_size, estimate, find_memory, make_machine, sizes
from .model import Model, find
from .quality import LOSSLESS, known, objection
from .question import Question
from .reasons import reasons
from .rules import Rule, rule_for
from .schemes import SCHEMES, weights_here
from .served import served
from .speculation import Speculation, speculation

KV_DTYPES = (LOSSLESS, "int8", "fp8_e4m3")


def advise_on(question: Question) -> Advice:
    """Answers a question.

    Raises:
        ConfigError: the model fits on no number of such devices, or not so many tokens.
        ModelLoadError: it cannot be found, or is none whose work is known.
    """
    model = find(question.model)
    if question.length > model.shape.max_position:
        raise ConfigError(
            f"input_len and output_len are {question.length:,} together, allowed: the "
            f"{model.shape.max_position:,} tokens that {model.name} takes"
        )
    figures = find_figures(question)
    rule = rule_for(figures, question.goal, question.accuracy)
    candidates = _ranked(
        question.goal,
        [
            _candidate(question, model, figures, weights, kv_dtype)
            for weights in weights_here(model.shape, figures).values()
            for kv_dtype in KV_DTYPES
        ],
    )
    if candidates[0].estimate is None:
        raise ConfigError(_fits_nowhere(question, model, figures, candidates))
    best = _choose(question.goal, rule, candidates)
    today = _choose(question.goal, rule, [c for c in candidates if c.served.today])
    advice = Advice(
        question=question,
        model=model,
        figures=figures,
        rule=rule,
        best=best,
        speculation=_speculation(question, best),
        today=today if best is None or not best.served.today else best,
        candidates=tuple(candidates),
    )
    return replace(advice, reasons=tuple(reasons(advice)))


def _candidate(
    question: Question, model: Model, figures: Figures, weights: Weights, kv_dtype: str
) -> Candidate:
    scheme, tried = weights.name, []
    for gpus in sizes(question, model):
        machine = make_machine(question, model, figures, weights, kv_dtype, gpus)
        memory = find_memory(question, machine)
        if memory.fits:
            tried.append(estimate(question, machine, memory))
    chosen = best_size(question.goal, tried) if tried else None
    quality = known("weights", scheme, model.name)
    kv_quality = known("kv", kv_dtype, model.name)
    return Candidate(
        scheme=scheme,
        kv_dtype=kv_dtype,
        memory=memory if chosen is None else chosen.memory,
        estimate=chosen,
        weights_quality=quality,
        kv_quality=kv_quality,
        objection=objection(scheme, kv_dtype, quality, kv_quality, question.accuracy),
        served=served(question, model, figures, scheme, kv_dtype, chosen),
    )


def _ranked(goal: str, candidates: Sequence[Candidate]) -> list[Candidate]:
    """What is possible first, then what misses p99 or accuracy, then what fits nowhere; of these
    under "latency" fewer devices first, as more of them make anything faster."""

    def rank(candidate: Candidate) -> tuple[bool, bool, int, float]:
        gpus = candidate.estimate.gpus if candidate.estimate and goal == "latency" else 0
        nowhere = candidate.estimate is None
        return nowhere, not candidate.is_possible, gpus, -candidate.score(goal)

    return sorted(candidates, key=rank)


def _choose(goal: str, rule: Rule, ranked: Sequence[Candidate]) -> Candidate | None:
    """Of what is possible the best; of those that are alike the rule's scheme, or what loses less,
    and of its formats of pages the one that loses least."""
    possible = [candidate for candidate in ranked if candidate.is_possible]
    if not possible:
        return None
    chosen = min(_alike(goal, possible[0], possible), key=lambda c: _by_scheme(c, rule))
    same = [candidate for candidate in possible if candidate.scheme == chosen.scheme]
    return min(_alike(goal, same[0], same), key=_by_pages)


def _alike(goal: str, first: Candidate, others: Sequence[Candidate]) -> list[Candidate]:
    """Those that are as good as the first, which is the best of them."""
    return [
        candidate
        for candidate in others
        if MARGIN * candidate.score(goal) >= first.score(goal)
        and (goal != "latency" or _gpus(candidate) == _gpus(first))
    ]


def _by_scheme(candidate: Candidate, rule: Rule) -> tuple[bool, bool, float, int]:
    return (
        candidate.scheme != rule.scheme,
        candidate.kv_dtype != LOSSLESS,
        candidate.weights_quality.ratio or float("inf"),
        -SCHEMES[candidate.scheme].bits,
    )


def _by_pages(candidate: Candidate) -> tuple[bool, float]:
    return candidate.kv_dtype != LOSSLESS, candidate.kv_quality.order


def _gpus(candidate: Candidate) -> int:
    return candidate.estimate.gpus if candidate.estimate else 0


def _speculation(question: Question, best: Candidate | None) -> Speculation | None:
    if best is None or best.estimate is None or question.output_len == 1:
        return None
    batch = 1 if question.goal == "latency" else best.estimate.batch
    return speculation(best.estimate.machine, question, batch)


def _fits_nowhere(
    question: Question, model: Model, figures: Figures, candidates: Sequence[Candidate]
) -> str:
    least = min(candidates, key=lambda c: c.memory.weights + c.memory.request)
    memory, most = least.memory, sizes(question, model)[-1]
    total = memory.total / 1e9
    return (
        f"{model.name} does not fit on {most} {question.gpu}: {least.name}, which takes least, has "
        f"{memory.weights / 1e9:.2f} GB of weights, and one request of {question.length:,} tokens "
        f"takes {memory.request / 1e9:.2f} GB and its step {memory.temporaries / 1e9:.2f} GB, of "
        f"{total:.2f} GB that may be filled of {most * figures.memory / 1e9:.2f}; allowed: a "
        "smaller model, fewer tokens, a larger gpu_memory_utilization, or other devices"
    )
