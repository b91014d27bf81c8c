"""What one step computes: the word between scheduler, packing and runner."""

from __future__ import annotations

from dataclasses import dataclass

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

    `num_pages` is the most pages that a chunk's positions reach; longer block tables hold
    pages for later chunks.
    """

    chunks: list[Chunk]
    bucket: Bucket
    num_tokens: int
    num_pages: int
