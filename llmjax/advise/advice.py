"""What is answered."""

from __future__ import annotations

from dataclasses import dataclass

from ..simulate.device import Figures
from .estimate import Estimate, Memory
from .model import Model
from .quality import Quality
from .question import Question
from .rules import Rule
from .served import Served
from .speculation import Speculation


@dataclass(frozen=True)
class Candidate:
    """A scheme with pages of a format.

    Attributes:
        scheme: a key of `SCHEMES`.
        memory: of the estimate's devices; where it fits nowhere, of the most there may be.
        estimate: on the fewest devices that hold it and keep p99; where throughput is the goal on
            the number of them of which each gives most, the fewest of those that are alike. Where
            no number keeps p99, on that on which a lone answer ends soonest. None: it fits
            nowhere.
        objection: why it is not accurate enough, if it is not.
    """

    scheme: str
    kv_dtype: str
    memory: Memory
    estimate: Estimate | None
    weights_quality: Quality
    kv_quality: Quality
    objection: str | None
    served: Served

    @property
    def name(self) -> str:
        return f"{self.scheme} with KV in {self.kv_dtype}"

    @property
    def is_possible(self) -> bool:
        """Whether it fits, keeps p99 and is accurate enough."""
        return self.estimate is not None and self.estimate.keeps_p99 and self.objection is None

    def score(self, goal: str) -> float:
        """What a goal ranks by, more is better."""
        return 0.0 if self.estimate is None else self.estimate.score(goal)


@dataclass(frozen=True)
class Advice:
    """What to serve a model in, and why.

    Attributes:
        best: what is advised; None where nothing that is accurate enough keeps p99.
        speculation: whether it pays with `best`, at its batch, or for a lone answer where that is
            the goal.
        today: the best that llmjax serves today; `best` itself where it does.
        candidates: all that are for the device, by the goal, first those that are possible.
        rule: of thumb, that the choice started from.
        reasons: in words, with the arithmetic.
    """

    question: Question
    model: Model
    figures: Figures
    rule: Rule
    best: Candidate | None
    speculation: Speculation | None
    today: Candidate | None
    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...] = ()
