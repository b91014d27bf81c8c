"""What one step computes: the word between scheduler, packing and runner."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache.page_store import Transfer
from ..request import Sequence
from .buckets import Bucket


@dataclass(eq=False, slots=True)
class Chunk:
    """Positions `start` to `start + count - 1` of one sequence, computed in one step.

    Attributes:
        samples: the last position's logits give the sequence's next token.

    The host knows the input tokens below `len(seq.tokens)`; a decode beyond that takes the
    token which the step before it samples.
    """

    seq: Sequence
    start: int
    count: int
    samples: bool


@dataclass(eq=False)
class Plan:
    """One step: its rows, decodes first, and the bucket they are padded to.

    Attributes:
        num_pages: the most pages that a chunk's positions reach; longer block tables hold
            pages for later chunks.
        admitted: the chunks of sequences that begin to run, or to run again.
        transfers: what the device copies before the step, in this order.
    """

    chunks: list[Chunk]
    bucket: Bucket
    num_tokens: int
    num_pages: int
    admitted: list[Chunk]
    transfers: list[Transfer]

    @property
    def num_decodes(self) -> int:
        """Sequences with one token, which is how all that decode are seen."""
        return sum(chunk.count == 1 for chunk in self.chunks)
