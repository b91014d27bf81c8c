"""What one step computes: the word between scheduler, packing and runner."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache.page_store import Transfer
from ..request import Sequence
from .buckets import Bucket


@dataclass(eq=False, slots=True)
class Chunk:
    """Positions `start` to `start + count - 1` of one sequence.

    Attributes:
        samples: how many tokens are sampled: of a prompt's part none, or one after its last
            position; of a decode one after each position.
        dropped: tokens before it that were evicted.

    The host knows the input tokens below `len(seq.tokens)`; a decode beyond that takes the
    token which the step before it samples.
    """

    seq: Sequence
    start: int
    count: int
    samples: int
    dropped: int = 0

    @property
    def kv_len(self) -> int:
        """Tokens that its last position sees, itself counted."""
        return self.start + self.count - self.dropped

    @property
    def width(self) -> int:
        """Positions that are computed at once: of a decode of several steps, one in each."""
        return self.count if self.samples < 2 else 1


@dataclass(eq=False)
class Plan:
    """One step, or several decode steps of the same rows, which one program computes.

    Attributes:
        chunks: the rows, decodes first.
        bucket: what they are padded to.
        num_tokens: of a step.
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
    def num_steps(self) -> int:
        """Steps that are computed one behind the other."""
        return max(1, *(c.samples for c in self.chunks))

    @property
    def num_decodes(self) -> int:
        """Chunks that compute an output token a step, and give the next."""
        return sum(c.width == 1 and c.start >= c.seq.prompt_len for c in self.chunks)

    @property
    def num_decoded(self) -> int:
        """Output tokens that these compute, of all steps."""
        return self.num_decodes + sum(c.count - c.width for c in self.chunks)
