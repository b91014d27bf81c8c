"""How far decodes go on before the host has its turn. Pure Python, no jax.

A plan of decodes alone may have several steps (`num_scheduler_steps`), which one program computes.
Each row goes on as far as its pages reach: it gets those of all its steps where that takes nothing
from others, and otherwise stops at the end of what it has. It never goes beyond its last token, nor
to where older ones are evicted, and ends at a stop token by itself (`ends.py`). So a row has all
the tokens that were planned, or its sequence has ended: later plans may count on them.

One step at a time remains where a row's constraint must see each token before the next, and where
somebody sits out until a step in flight ends.
"""

from __future__ import annotations

from ..cache.manager import KVCache
from ..request import Sequence
from .buckets import Buckets
from .plan import Chunk


def look_ahead(
    chunks: list[Chunk],
    most: int,
    max_len: dict[Sequence, int],
    cache: KVCache,
    buckets: Buckets,
) -> None:
    """Lets decodes go on for up to `most` steps.

    Args:
        chunks: those of a plan, all decodes that have a page for their next position.
        max_len: tokens at which each sequence ends.
    """
    if any(chunk.seq.constraint is not None for chunk in chunks):
        return
    layout = cache.layout
    # The last token of a sequence is sampled and not computed.
    ends = [layout.run_end(c.start, min(c.start + most, max_len[c.seq] - 1)) for c in chunks]
    pages = max(layout.num_blocks(end - c.dropped) for c, end in zip(chunks, ends, strict=True))
    bucket = buckets.choose(len(chunks), len(chunks), True, pages)
    if bucket is None or not bucket.decode_only:
        return  # the program is not there yet
    for chunk, end in zip(chunks, ends, strict=True):
        if not cache.extend(chunk.seq, chunk.start, end):
            end = min(end, layout.block_size * min(map(len, chunk.seq.block_tables)))
        chunk.count = chunk.samples = end - chunk.start
