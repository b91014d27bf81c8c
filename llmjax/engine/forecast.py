"""What running sequences will need: pages at coming moments, from how long outputs were.

A request is admitted where everything that runs is expected to find room until it ends, so that
memory fills up and hardly anyone has to be preempted. Expected is the mean of pages held, over
how long outputs get, and above it some standard deviations (`margin`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..cache.layout import KVLayout
from ..request import SamplingParams, Sequence

EDGES = (0, 1, 2, 3, *(m * 2**i for i in range(1, 20) for m in (2, 3)))
"""Output lengths: a bin is above one and up to the next."""
PRIOR_MEAN, PRIOR_COUNT = 256.0, 4.0
"""As if so many outputs had been seen, which ended at any token with the same chance."""
MOST_SEEN = 1000
"""Outputs after which older ones count half."""
MOMENTS = np.array((0, *(m * 2**i for i in range(12) for m in (4, 5, 6, 7))))
"""Decode steps from now."""

_AT = {length: i for i, length in enumerate(EDGES)}


def may_stop(params: SamplingParams) -> bool:
    """Whether anything but its length may end an output."""
    return bool(not params.ignore_eos or params.stop_token_ids or params.stop)


class Lengths:
    """How long outputs get, from all that were generated: for each bin, of those that came
    there the share that ended in it. So outputs that still run, or that their max_tokens ended,
    count with as much as is known of them.
    """

    def __init__(self) -> None:
        widths = np.diff(EDGES)
        self._seen = np.full(len(widths), PRIOR_COUNT)
        self._ended = self._seen * -np.expm1(-widths / PRIOR_MEAN)
        self._hazard: np.ndarray | None = None

    def grown(self, length: int) -> None:
        """An output has so many tokens and goes on."""
        if (i := _AT.get(length, 0)) > 0:
            self._count(i - 1, 0)

    def ended(self, length: int) -> None:
        """An output has ended, and not for its max_tokens."""
        if length > 0:
            self._count(int(np.searchsorted(EDGES, length)) - 1, 1)

    def _count(self, i: int, ended: int) -> None:
        self._seen[i] += 1
        self._ended[i] += ended
        if self._seen[0] > MOST_SEEN:
            self._seen /= 2
            self._ended /= 2
        self._hazard = None

    def survival(self, now: np.ndarray, later: np.ndarray) -> np.ndarray:
        """The chance that an output of length `now` gets longer than `later`."""
        if self._hazard is None:
            rates = -np.log1p(-np.minimum(self._ended / self._seen, 1 - 1e-9))
            self._hazard = np.concatenate(([0.0], np.cumsum(rates)))
        at = np.interp(later, EDGES, self._hazard), np.interp(now, EDGES, self._hazard)
        return np.exp(at[1] - at[0])


@dataclass(slots=True)
class Load:
    """Pages at each of `MOMENTS`, until the next of them.

    Attributes:
        mean, variance: of what is expected.
        limit: if no output ended.
    """

    mean: np.ndarray | float = 0.0
    variance: np.ndarray | float = 0.0
    limit: np.ndarray | float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(
            self.mean + other.mean, self.variance + other.variance, self.limit + other.limit
        )

    def most(self, margin: float) -> float:
        """Pages at the worst moment: so many standard deviations above the mean, and never above
        the limit."""
        expected = self.mean + margin * np.sqrt(self.variance)
        return float(np.max(np.minimum(expected, self.limit)))


class Forecast:
    """The load of sequences that run.

    Pages of windows stay as many; of the others a sequence holds more as it grows, until what
    is older is evicted.
    """

    def __init__(self, layout: KVLayout):
        self.lengths = Lengths()
        self._layout = layout
        self._growing = sum(window is None for window in layout.windows)
        self._fixed: dict[Sequence, int] = {}

    @property
    def sequences(self) -> set[Sequence]:
        """Those that have begun and not ended."""
        return set(self._fixed)

    def begin(self, seq: Sequence, pages: int) -> None:
        """A sequence has been admitted with so many pages that were to be had."""
        self._fixed[seq] = pages - self._at_first(seq)

    def end(self, seq: Sequence) -> None:
        """It runs no more."""
        self._fixed.pop(seq, None)

    def load(self, sequences: Iterable[Sequence], max_len: dict[Sequence, int]) -> Load:
        """Of sequences that run, each up to `max_len` tokens."""
        return self._load([self._row(seq, self._fixed[seq], max_len[seq]) for seq in sequences])

    def load_of(self, seq: Sequence, pages: int, max_len: int) -> Load:
        """Of one that waits and would be admitted with so many pages."""
        return self._load([self._row(seq, pages - self._at_first(seq), max_len)])

    def _at_first(self, seq: Sequence) -> int:
        """Pages of growing groups that a sequence has when it is admitted."""
        layout = self._layout
        return self._growing * layout.num_blocks(layout.whole(len(seq.tokens)))

    def _row(self, seq: Sequence, fixed: int, max_len: int) -> tuple[float, ...]:
        params, output = seq.request.params, seq.num_tokens - seq.prompt_len
        least = params.min_tokens if may_stop(params) else math.inf
        return (fixed, seq.num_tokens, max_len - seq.num_tokens, output, least)

    def _load(self, rows: list[tuple[float, ...]]) -> Load:
        if not rows:
            return Load()
        fixed, tokens, left, output, least = np.array(rows, float).T[:, :, None]
        now, later = np.maximum(output, least), np.maximum(output + MOMENTS, least)
        may_go_on = left > MOMENTS
        alive = self.lengths.survival(now, later) * may_go_on
        until = np.append(MOMENTS[1:], 2 * MOMENTS[-1])
        blocks = np.ceil((tokens + np.minimum(until, left)) / self._layout.block_size)
        if self._layout.most_blocks is not None:
            blocks = np.minimum(blocks, self._layout.most_blocks)
        pages = fixed + self._growing * blocks
        variance = (alive * (1 - alive) * pages**2).sum(0)
        return Load((alive * pages).sum(0), variance, (may_go_on * pages).sum(0))
