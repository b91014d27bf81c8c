"""Where the rows of a decode of several steps end, as the device is told."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from ..request import Sequence
from .plan import Plan

MAX_IDS = 16
"""Of a sequence's stop tokens, those that the device knows. At another it goes on, and what comes
behind is thrown away by the host, as it has the last word in any case."""
_NONE = -1
ROW_SIZE = 2 + MAX_IDS
"""Values of a row of what `EndTable.pack` gives."""


class Ends(NamedTuple):
    """Attributes:
    steps: that each row takes at most; 0 for padding.
    first: the first position at which a stop token ends it.
    ids: its stop tokens, and -1.
    """

    steps: Int[Array, " S"]
    first: Int[Array, " S"]
    ids: Int[Array, "S MAX_IDS"]

    def reached(self, tokens: Int[Array, " S"], positions: Int[Array, " S"]) -> Bool[Array, " S"]:
        """Which rows end with these tokens at these positions, as `stopping.stop_at` says."""
        return (positions >= self.first) & (tokens[:, None] == self.ids).any(-1)


class EndTable:
    """Stop tokens of the running sequences, by slot."""

    def __init__(self, num_slots: int):
        self._first = np.zeros(num_slots, np.int32)
        self._ids = np.full((num_slots, MAX_IDS), _NONE, np.int32)

    def admit(self, seq: Sequence) -> None:
        """Writes a sequence's row."""
        request, params = seq.request, seq.request.params
        ids = set(params.stop_token_ids or ())
        ids |= set() if params.ignore_eos else request.eos_token_ids
        known = sorted(ids)[:MAX_IDS]
        self._first[seq.slot] = seq.prompt_len + params.min_tokens
        self._ids[seq.slot] = known + [_NONE] * (MAX_IDS - len(known))

    def pack(self, plan: Plan) -> Int[np.ndarray, "S ends"]:
        """A plan's rows of decodes."""
        slots = [chunk.seq.slot for chunk in plan.chunks]
        rows, packed = len(slots), np.zeros((plan.bucket.seqs, ROW_SIZE), np.int32)
        packed[:rows, 0] = [chunk.count for chunk in plan.chunks]
        packed[:rows, 1] = self._first[slots]
        packed[:rows, 2:] = self._ids[slots]
        return packed


def unpack_ends(packed: Int[Array, "S ends"]) -> Ends:
    """Slices it apart, on the device."""
    return Ends(packed[:, 0], packed[:, 1], packed[:, 2:])
