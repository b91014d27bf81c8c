"""A process that does not lead: it carries out the leader's orders, one after the other."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass

from ..errors import GroupError
from ..parallel.group import Group
from ..sampling import SampledTokens
from .engine import Engine
from .orders import SampleOrder, ScoreOrder, StepOrder, Stop, decode, digest
from .step import StepOutput

log = logging.getLogger(__name__)


@dataclass
class _Step:
    """A step that the leader has not collected yet, as far as this process knows."""

    order: StepOrder
    output: StepOutput
    sampled: SampledTokens | None = None


class Follower:
    """Runs an engine whose scheduler is in another process.

    Args:
        engine: made as the leader's is, so that it has compiled the same programs.

    Attributes:
        patient: whether a request to end is left to the leader, which lets requests end first.
    """

    def __init__(self, engine: Engine, group: Group):
        self._engine, self._group = engine, group
        self._steps: deque[_Step] = deque()
        self._num_checked = 0
        self.patient = True
        self._stop = threading.Event()

    def stop(self) -> None:
        """Ends `run` without the leader's word. Any thread, or a signal handler, may call it."""
        self._stop.set()

    def run(self) -> None:
        """Follows until the leader says that it is done.

        Raises:
            GroupError: the leader is lost or has failed, or sampled other tokens than are sampled
                here.
        """
        while self._obey():
            pass

    def _obey(self) -> bool:
        """One order; whether more are to come."""
        runner = self._engine.runner
        if self._stop.is_set():
            raise GroupError(f"process {self._group.index} was stopped")
        try:
            message = self._group.receive()
        except TimeoutError:
            return True
        order, digests = decode(message, runner.slots)
        for expected in digests:
            self._check(expected)
        match order:
            case StepOrder():
                self._steps.append(_Step(order, runner.execute(order)))
            case SampleOrder():
                step = self._steps[-1]
                rows = step.order.packed.rows
                step.sampled = runner.choose(step.order.bucket, step.output, rows, order)
            case ScoreOrder():
                runner.scorer.score(self._steps[0].output, order)
            case Stop(""):
                return False
            case Stop(reason):
                raise GroupError(f"process 0 has failed: {reason}")
        return True

    def _check(self, expected: int) -> None:
        """Compares the oldest step's tokens with the leader's."""
        sampled = self._steps.popleft().sampled
        assert sampled is not None
        found = digest(self._engine.runner.settle(sampled).token_ids)
        if found != expected:
            raise GroupError(
                f"process {self._group.index} has sampled other tokens than process 0 in step "
                f"{self._num_checked}: what they compute has come apart"
            )
        self._num_checked += 1
