"""Pages that another engine has computed: which of a prompt go there, and where they are put.

They come as pages of host memory that one waiting sequence wants, so that its admission loads
them like any others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..request import Sequence
from .layout import KVLayout
from .manager import KVCache
from .page_store import Bring
from .radix_tree import Node
from .way import GONE

At = tuple[int, int]
"""(group of layers, block of tokens)"""


def wanted_of(layout: KVLayout, prompt_len: int, start: int) -> list[At]:
    """The pages that it takes to compute no more than a prompt's end, where the blocks before
    `start` are there: of a window the last ones only."""
    end = (prompt_len - 1) // layout.block_size  # the last token's logits are wanted
    position = end * layout.block_size
    return [
        (group, block)
        for group in range(layout.num_groups)
        for block in range(max(start, layout.first_block(group, position)), end)
    ]


def pages_of(layout: KVLayout, seq: Sequence, start: int) -> dict[At, int]:
    """The pages of a computed prompt that `wanted_of` names. Those that are gone are left out."""
    return {
        (group, block): page
        for group, block in wanted_of(layout, seq.prompt_len, start)
        if (page := seq.block_tables[group][block]) != GONE
    }


def bring(cache: KVCache, seq: Sequence, contents: Mapping[At, Any]) -> bool:
    """Puts pages of a waiting sequence's prompt into the tree and into host memory.

    Args:
        contents: what the device is to find there, in a form of its own.

    Returns:
        False, and nothing done, where another sequence is about to compute some of the same, or
        host memory is full of what others want: that passes.
    """
    host, store = cache.host, cache.store
    assert host is not None
    blocks = 1 + max((block for _, block in contents), default=-1)
    if any(node.owner is not None for node in _path(cache, seq, blocks, add=False)):
        return False
    path = list(_path(cache, seq, blocks, add=True))
    for node in path:
        node.holders += 1  # or it could go as what stands below it makes room
    cache.want(seq, path)
    entries = {path[block].entries[group]: at for at in contents for group, block in (at,)}
    missing = [entry for entry in entries if entry.is_empty]
    has_room = len(missing) <= host.num_to_be_had
    for entry in missing if has_room else ():
        host.take(entry, is_brought=True)
        assert entry.slot is not None
        store.transfers.append(Bring(entry.slot, contents[entries[entry]]))
    if not has_room:
        cache.unwant(seq)
    for node in path:
        node.holders -= 1
    cache.prune(path[-1] if path else cache.root_of(seq))
    return has_room


def _path(cache: KVCache, seq: Sequence, blocks: int, *, add: bool) -> Iterator[Node]:
    """The nodes of a prompt's first blocks; only those that are there, unless `add`."""
    size, tokens = cache.layout.block_size, seq.request.prompt_token_ids
    node = cache.root_of(seq)
    for at in range(0, blocks * size, size):
        block = tuple(tokens[at : at + size])
        child = node.child(block)
        if child is None:
            if not add:
                return
            child = node.add(block)
        yield child
        node = child
