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
        dropped: tokens before it that were evicted.

    The host knows the input tokens below `len(seq.tokens)`; a decode beyond that takes the
    token which the step before it samples.
    """

    seq: Sequence
    start: int
    count: int
    samples: bool
    dropped: int = 0

    @property
    def kv_len(self) -> int:
        """Tokens that its last position sees, itself counted."""
        return self.start + self.count - self.dropped


@dataclass(eq=False)
class Plan:
    """One step: its rows, decodes first, and the bucket they are padded to.

    Attributes:
        num_pages: the most pages that a chunk reads or writes; longer block tables hold pages
            for later chunks.
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
        """Chunks, of a token each, that compute an output token and give the next."""
        return sum(c.count == 1 and c.start >= c.seq.prompt_len for c in self.chunks)
