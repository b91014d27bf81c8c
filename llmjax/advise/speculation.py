"""Whether drafting tokens and verifying several at once pays (Leviathan et al. 2023).

A step that verifies k drafts computes k + 1 positions of each sequence and reads the weights once:
it costs little more than a step of one while reading decides, and k + 1 times as much once
operations do. Of k drafts, each accepted with probability a, (1 - a^(k+1)) / (1 - a) tokens come
of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..simulate.device import Machine
from .estimate import Step, answer_seconds, decode_work, prompt_work, prompts_begun
from .question import Question

MOST_DRAFTS = 8
DRAFT_SHARE = 0.05
"""Of the model's bytes and operations that one token of a draft takes: a small draft model, or a
head of one layer in about twenty; an assumption."""
WORTH = 1.05
"""Times as fast as without, from which on it pays."""


@dataclass(frozen=True)
class Speculation:
    """What drafting comes to at a batch.

    Attributes:
        batch: sequences that decode together.
        drafts: tokens drafted a step, of 1 to 8 what gains most.
        acceptance: of each of them, assumed.
        tokens: of a step and sequence, expected.
        step_s: seconds of a step that gives each sequence a token, prompts of others beside.
        verify_s, draft_s: of one that verifies, which takes more of these prompts as it comes less
            often, and of its drafts.
        bound: what decides how long the verifying step takes: "bytes" or "operations".
        speedup: answers a second, times those without; the draft reads all prompts too.
        pays: whether that is worth it.
    """

    batch: int
    drafts: int
    acceptance: float
    tokens: float
    step_s: float
    verify_s: float
    draft_s: float
    bound: str
    speedup: float
    pays: bool


def speculation(machine: Machine, question: Question, batch: int) -> Speculation:
    """The best number of drafts for requests that run together."""
    tried = (_with(machine, question, batch, k) for k in range(1, MOST_DRAFTS + 1))
    return max(tried, key=lambda found: found.speedup)


def _with(machine: Machine, question: Question, batch: int, drafts: int) -> Speculation:
    tokens = float(sum(question.acceptance**i for i in range(drafts + 1)))
    step_s = machine.seconds(
        decode_work(machine, question, batch, prompts=prompts_begun(question, batch))
    )
    begun = prompts_begun(question, batch, tokens)
    work = decode_work(machine, question, batch, positions=drafts + 1, prompts=begun)
    verify = Step.of(machine, work)
    alone_s = machine.seconds(decode_work(machine, question, batch))
    draft_s = drafts * DRAFT_SHARE * (alone_s - machine.overhead)
    answer_s = answer_seconds(
        machine, question, batch, tokens=tokens, positions=drafts + 1, beside=draft_s
    )
    prompt_s = machine.seconds(prompt_work(machine, question.input_len)) - machine.overhead
    speedup = answer_seconds(machine, question, batch) / (answer_s + batch * DRAFT_SHARE * prompt_s)
    return Speculation(
        batch=batch,
        drafts=drafts,
        acceptance=question.acceptance,
        tokens=tokens,
        step_s=step_s,
        verify_s=verify.seconds,
        draft_s=draft_s,
        bound=verify.bound,
        speedup=speedup,
        pays=speedup >= WORTH,
    )
