"""Why: the arithmetic behind an advice, line by line."""

from __future__ import annotations

from collections.abc import Iterator

from .advice import Advice, Candidate
from .estimate import MARGIN, Estimate, Step, decode_work, prompts_begun
from .quality import LOSSLESS
from .question import Question
from .served import SPECULATION
from .speculation import Speculation


def reasons(advice: Advice) -> Iterator[str]:
    """The lines, most needed first."""
    if advice.best is None:
        yield from _nothing(advice)
    else:
        assert advice.best.estimate is not None
        yield from _memory(advice, advice.best.estimate)
        yield from _times(advice.question, advice.best.estimate)
        yield from _beside(advice, advice.best, "bf16", advice.best.kv_dtype)
        yield from _beside(advice, advice.best, advice.best.scheme, LOSSLESS)
        yield _rule(advice, advice.best)
        if advice.speculation is not None:
            yield _drafting(advice, advice.speculation)
        yield _quality(advice.best)
    yield from _today(advice)


def _gb(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"


def _requests(count: int) -> str:
    return f"{count:,} request{'s' * (count != 1)}"


def _memory(advice: Advice, chosen: Estimate) -> Iterator[str]:
    machine, memory, shape = chosen.machine, chosen.memory, advice.model.shape
    weights, length = machine.weights, advice.question.length
    yield (
        f"Weights: {_gb(memory.weights)}, {weights.bits:.4g} bits each in the layers "
        f"({shape.matrix_params / 1e9:.3g}e9 of them), {weights.head_bits:.4g} in the head; "
        f"{_gb(2 * shape.num_params)} in 16 bits."
    )
    windows = [window for window in shape.windows if window is not None and window < length]
    bounded = (
        f" {len(windows)} layers keep a window of {max(windows):,} tokens only." if windows else ""
    )
    heads = chosen.gpus * -(-shape.num_kv_heads // chosen.gpus)
    yield (
        f"Keys and values: 2 x {shape.num_layers} layers x {heads} heads x "
        f"{machine.kv_bytes // 2 // heads} bytes (a head of {shape.head_dim} in "
        f"{machine.kv_dtype}{'' if machine.kv_dtype == 'bfloat16' else ', and its scale'}) = "
        f"{memory.kv_token:,} bytes a token.{bounded}"
    )
    room = memory.total - memory.weights - memory.temporaries
    yield (
        f"Room: {_gb(memory.total)} may be filled ({chosen.gpus} x {_gb(machine.figures.memory)}); "
        f"less weights and {_gb(memory.temporaries)} that a step takes {_gb(room)} are left, for "
        f"{_requests(memory.fits)} of {length:,} tokens at {_gb(memory.request)}."
    )


def _times(question: Question, chosen: Estimate) -> Iterator[str]:
    steps = question.output_len - 1
    if steps and question.goal == "latency":
        alone = Step.of(chosen.machine, decode_work(chosen.machine, question, 1))
        yield f"Decoding alone: {_step(alone)}."
    if steps:
        yield f"Decoding, {_requests(chosen.batch)} at once: {_step(chosen.decode)}."
    yield f"A prompt of {question.input_len:,} tokens: {_step(chosen.prompt)}."
    if steps and chosen.batch > 1:
        begun = prompts_begun(question, chosen.batch)
        yield f"Decoding with {begun:.3g} prompts of others: {_step(chosen.mixed)}."
    made_of = f"its prompt and {steps:,} such steps" if steps else "prompts one after the other"
    limit = "" if question.p99 is None else f", within the {question.p99:g} s of p99"
    yield (
        f"An answer, {made_of}: {chosen.answer_s:,.2f} s{limit}; {chosen.alone_s:,.2f} s where it "
        f"is alone. {chosen.tokens_per_second:,.0f} tokens a second"
        f"{'' if chosen.gpus == 1 else f', {chosen.per_gpu:,.0f} of each GPU'}."
    )


def _step(step: Step) -> str:
    fixed = step.seconds - max(step.read_s, step.compute_s)
    return (
        f"{_gb(step.read_bytes)} read in {_ms(step.read_s)}, {_ms(step.compute_s)} of operations; "
        f"{step.bound} decide, and with {_ms(fixed)} beside them it is {_ms(step.seconds)}"
    )


def _beside(advice: Advice, best: Candidate, scheme: str, kv_dtype: str) -> Iterator[str]:
    """What the best gains on one that loses less."""
    if (best.scheme, best.kv_dtype) == (scheme, kv_dtype):
        return
    [other] = (c for c in advice.candidates if (c.scheme, c.kv_dtype) == (scheme, kv_dtype))
    yield f"Why not {other.name}: {_against(advice, best, other)}."


def _gain(goal: str, best: Candidate, other: Candidate) -> str:
    ours, theirs = best.estimate, other.estimate
    assert ours is not None and theirs is not None
    if goal == "latency":
        return (
            f"a lone answer of {best.name} ends in {ours.alone_s:,.2f} s, of {other.name} in "
            f"{theirs.alone_s:,.2f} s"
        )
    each = " of each GPU" if max(ours.gpus, theirs.gpus) > 1 else ""
    return (
        f"{best.name} makes {ours.per_gpu / theirs.per_gpu:.2f} times the tokens a second{each}, "
        f"{ours.per_gpu:,.0f} beside {theirs.per_gpu:,.0f}"
    )


def _rule(advice: Advice, best: Candidate) -> str:
    said = f"Rule of thumb: {advice.rule.text}."
    if best.scheme == advice.rule.scheme:
        return f"{said} By arithmetic too it is {best.scheme}."
    of_rule = [c for c in advice.candidates if c.scheme == advice.rule.scheme]
    theirs = next((c for c in of_rule if c.kv_dtype == best.kv_dtype), of_rule[0])
    return f"{said} Arithmetic disagrees. Why not {theirs.name}: {_against(advice, best, theirs)}."


def _against(advice: Advice, best: Candidate, other: Candidate) -> str:
    """Why `other` is not what is advised."""
    goal = advice.question.goal
    ours, theirs = best.estimate, other.estimate
    if other.objection is not None:
        return f"it is not accurate enough ({other.objection})"
    if theirs is None:
        return f"it does not fit ({_gb(other.memory.weights)} of weights)"
    if not theirs.keeps_p99:
        return f"a lone answer takes {theirs.alone_s:,.2f} s on {theirs.gpus} {advice.question.gpu}"
    assert ours is not None
    if goal == "latency" and theirs.gpus != ours.gpus:
        return f"it needs {theirs.gpus} GPUs, not {ours.gpus}"
    return "; ".join((_gain(goal, best, other), *_differences(advice, ours, theirs)))


def _differences(advice: Advice, ours: Estimate, theirs: Estimate) -> Iterator[str]:
    """What makes one better than another, where it is more than a little."""
    if ours.gpus != theirs.gpus:
        yield f"{ours.gpus} against {theirs.gpus} GPUs"
    if theirs.prompt.seconds > MARGIN * ours.prompt.seconds:
        yield (
            f"a prompt takes {_ms(ours.prompt.seconds)} against {_ms(theirs.prompt.seconds)}, as "
            f"matrices multiply in {_products(ours)} against {_products(theirs)}"
        )
    batch = 1 if advice.question.goal == "latency" else ours.batch
    begun = prompts_begun(advice.question, batch)
    work = decode_work(theirs.machine, advice.question, batch, prompts=begun)
    step, other = Step.of(ours.machine, work), Step.of(theirs.machine, work)
    if advice.question.output_len > 1 and other.seconds > MARGIN * step.seconds:
        beside = f" and {begun:.3g} prompts" if begun else ""
        yield (
            f"a step of {_requests(batch)}{beside} takes {_ms(step.seconds)} (for {step.bound}, "
            f"{_gb(step.read_bytes)}) against {_ms(other.seconds)} (for {other.bound}, "
            f"{_gb(other.read_bytes)})"
        )
    if batch > MARGIN * theirs.batch:
        yield f"{ours.batch:,} run at once against {theirs.batch:,}"


def _products(chosen: Estimate) -> str:
    name = chosen.machine.weights.products
    return f"{name} ({chosen.machine.figures.peak_of(name) / 1e12:,.4g} Top/s at most)"


def _drafting(advice: Advice, found: Speculation) -> str:
    verdict = "It pays" if found.pays else "It does not pay"
    if advice.rule.speculation and not found.pays:
        verdict = "The rule has it, but it does not pay"
    elif found.pays and not SPECULATION:
        verdict = "It pays, but llmjax does not speculate yet"
    return (
        f"Speculation, {_requests(found.batch)} at once, if {found.acceptance:.0%} of drafts are "
        f"accepted: a step that verifies {found.drafts} gives {found.tokens:.2f} tokens; it takes "
        f"{_ms(found.verify_s)} (for {found.bound}) against {_ms(found.step_s)}, and drafting "
        f"{_ms(found.draft_s)}. Answers come {found.speedup:.2f} times as fast. {verdict}."
    )


def _quality(best: Candidate) -> str:
    return (
        f"Perplexity, times that of floats: weights {best.weights_quality}, KV {best.kv_quality}."
    )


def _nothing(advice: Advice) -> Iterator[str]:
    """Why nothing is advised."""
    question = advice.question
    keeping = [c for c in advice.candidates if c.estimate is not None and c.estimate.keeps_p99]
    if keeping:
        what = "fits" if question.p99 is None else f"keeps p99 of {question.p99:g} s"
        yield (f"What {what} is not accurate enough: {keeping[0].name}: {keeping[0].objection}.")
    allowed = [c for c in advice.candidates if c.estimate is not None and c.objection is None]
    if not allowed:
        yield f"What is accurate enough ({question.accuracy}) does not fit."
        return
    soonest = min(allowed, key=lambda c: c.estimate.alone_s if c.estimate else float("inf"))
    chosen = soonest.estimate
    assert chosen is not None
    yield (
        f"Nothing that is accurate enough keeps p99 of {question.p99:g} s: {soonest.name} on "
        f"{chosen.gpus} {question.gpu} is soonest, {chosen.alone_s:,.3f} s for a lone answer, of "
        f"which its prompt takes {_ms(chosen.prompt.seconds)}, and its "
        f"{question.output_len - 1:,} further tokens the rest."
    )


def _today(advice: Advice) -> Iterator[str]:
    best, today = advice.best, advice.today
    if advice.model.quantised is not None:
        yield (
            f"{advice.model.name} is quantised already ({advice.model.quantised}): other schemes "
            "are made of its floats."
        )
    if best is not None and best is not today:
        yield f"llmjax does not serve {best.name} today: {best.served.how}."
    if today is None:
        if best is not None:
            yield "llmjax serves nothing of this today."
        return
    assert today.estimate is not None
    beside = ""
    if best is not None and best is not today:
        beside = f" {today.name} ({_gain(advice.question.goal, best, today)})"
    needs = "" if today.served.needs is None else f"; it needs {today.served.needs}"
    yield f"llmjax serves today{beside}: {today.served.how}{needs}"
