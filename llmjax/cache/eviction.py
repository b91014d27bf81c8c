"""What a long sequence forgets, and when: a matter of positions only. Pure Python.

A sequence keeps at most `budget` tokens in the groups that see the whole context. At the positions
budget, budget + quantum, budget + 2 quanta ... a quantum of its older tokens leaves before the
token there is computed, and no step computes tokens on both sides of such a position. So what a
token sees follows from the tokens before it, whoever else runs and however the steps are cut.

What stays of the older tokens is in `kept` places of pages of the sequence's own; behind them come
the most recent tokens in the pages in which they were computed. There are two policies:

- "streaming": attention sinks (Xiao et al., 2024, StreamingLLM): the first tokens stay. They are
  rotated forward by what has left behind them, so that no distance exceeds the budget.
- "snapkv": each head keeps the tokens to which the last ones before that position paid most
  attention (Li et al., 2024, SnapKV), with the rotation of their true positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ConfigError

SINKS = 4
"""First tokens that stay (StreamingLLM); whole pages do."""
LOOKS_BACK = 32
"""The last tokens whose attention says what stays (SnapKV's observation window)."""


@dataclass(frozen=True)
class Eviction:
    """One way to forget; all numbers are tokens.

    Attributes:
        policy: "streaming" or "snapkv".
        budget: most that a sequence keeps.
        quantum: that leave at a time.
        kept: of the older ones, that stay.
    """

    policy: str
    budget: int
    quantum: int
    kept: int

    @classmethod
    def of(
        cls, policy: str, budget: int, *, block_size: int, windows: Iterable[int | None], unit: int
    ) -> Eviction:
        """The numbers for a budget: an eighth leaves at a time, a quarter is recent.

        Args:
            windows: of the layers; those shorter than the budget must stay whole.
            unit: such windows are read from a multiple of so many tokens on.

        Raises:
            ConfigError: the budget does not hold the windows.
        """
        inside = [w for w in windows if w is not None and w < budget]
        unit = unit if inside else block_size
        quantum = max(unit, budget // 8 // unit * unit)
        recent = budget // 4 // block_size * block_size
        if policy == "streaming":
            kept = -(-SINKS // block_size) * block_size
        else:
            kept = budget - quantum - recent
        least = max([quantum + w for w in inside] + [quantum + recent + block_size])
        if budget < least:
            raise ConfigError(
                f"kv_budget is {budget}, allowed: {-(-least // block_size) * block_size} or more "
                "with this model's sliding windows"
            )
        return cls(policy, budget, quantum, kept)

    @property
    def selects(self) -> bool:
        """Whether attention says what stays."""
        return self.policy == "snapkv"

    @property
    def recent(self) -> int:
        """Tokens that stay in any case, as they are the last."""
        return self.budget - self.quantum - self.kept

    @property
    def most_held(self) -> int:
        """Tokens that a sequence's pages have room for; sinks are there twice."""
        return self.budget if self.selects else self.budget + self.kept

    @property
    def looks_back(self) -> int:
        """The last tokens whose attention says what stays: they all see the same."""
        return min(LOOKS_BACK, self.quantum)

    def dropped(self, position: int) -> int:
        """Tokens that have left when the one at `position` is computed."""
        if position < self.budget:
            return 0
        return ((position - self.budget) // self.quantum + 1) * self.quantum

    def run_end(self, position: int) -> int:
        """Where a run of tokens from `position` on must end, as the next quantum leaves."""
        return self.budget + self.dropped(position)
