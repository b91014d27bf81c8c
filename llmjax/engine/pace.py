"""How many prompt tokens a step takes beside decodes, which wait for it.

Where a bound of the time between tokens is given, it is kept from step times as they are
measured: seconds = a + b * prompt tokens + c * sequences, fitted to the latest steps by least
squares that give outliers (a compilation, another process) little weight.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from ..config import SchedulerConfig

LEAST = 16
"""Prompts go on at this pace even where the bound cannot be kept."""
KEPT = 128
"""Latest steps of each kind, with prompt tokens and without, that count."""
REFIT = 8
"""Steps after which the fit is made anew."""
MARGIN = 2.5
"""Steps are meant to stay below the target by so many times their usual error."""
ROUNDS = 5
"""Of least squares, each with weights by the errors of the one before."""


class StepTimes:
    """What steps take, in seconds.

    Attributes:
        fit: for the step itself, for each prompt token and for each sequence that decodes; None
            before enough has been seen.
        error: of steps with prompt tokens, the median one, as a share of what was expected.
    """

    def __init__(self) -> None:
        self._steps: tuple[deque[tuple[float, ...]], ...] = (deque(maxlen=KEPT), deque(maxlen=KEPT))
        self._new = 0
        self.fit: tuple[float, float, float] | None = None
        self.error = 0.0

    def observe(self, prompt_tokens: int, sequences: int, seconds: float) -> None:
        self._steps[prompt_tokens > 0].append((1.0, prompt_tokens, sequences, seconds))
        self._new += 1
        if self._new >= REFIT and len(self._steps[True]) >= REFIT:
            self._new = 0
            self._refit()

    def _refit(self) -> None:
        rows = np.array([*self._steps[False], *self._steps[True]])
        x, y = rows[:, :3], rows[:, 3]
        size = np.maximum(np.abs(x).max(0), 1.0)
        weights = np.ones(len(y))
        for _ in range(ROUNDS):
            root = np.sqrt(weights)
            found = np.linalg.lstsq(x / size * root[:, None], y * root, rcond=1e-6)[0]
            errors = np.abs(y - x / size @ found)
            usual = max(float(np.median(errors)), 1e-9)
            weights = np.minimum(1.0, (2.5 * usual / np.maximum(errors, 1e-12)) ** 2)
        base, per_token, per_sequence = map(float, found / size)
        self.fit = (base, per_token, per_sequence)
        is_mixed = x[:, 1] > 0
        expected = np.maximum(x @ np.array(self.fit), 1e-9)
        self.error = float(np.median((errors / expected)[is_mixed]))


class Pace:
    """How many prompt tokens go beside decodes."""

    def __init__(self, config: SchedulerConfig):
        chunk = config.prefill_chunk_size
        self.most = min(config.mixed_prefill_tokens or chunk, chunk)
        target = config.target_itl_ms
        self.target = target / 1000 if target is not None else None
        self.times = StepTimes()

    def limit(self, num_decodes: int) -> int:
        """Prompt tokens for a step that so many sequences decode in."""
        if self.target is None or self.times.fit is None:
            return self.most
        base, per_token, per_sequence = self.times.fit
        target = self.target / (1 + MARGIN * self.times.error)
        left = target - base - per_sequence * num_decodes
        if per_token <= 0:
            return self.most
        return int(min(max(left / per_token, LEAST), self.most))

    def observe(self, prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step with decodes took so long, from the end of the one before it."""
        if self.target is not None:
            self.times.observe(prompt_tokens, num_decodes, seconds)
