"""Whether every account of a page agrees with every other; for tests and debugging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..request import Sequence
from .manager import KVCache
from .way import GONE


def check_balance(cache: KVCache, holders: Iterable[Sequence]) -> None:
    """Compares what `holders`, all sequences with pages, hold with what the cache says.

    Raises:
        RuntimeError: an account is off; says which.
    """
    layout, store, ways = cache.layout, cache.store, cache.ways
    held = Counter(
        page for seq in holders for pages in seq.page_lists for page in pages if page != GONE
    )
    nodes = [node for root in cache.roots.values() for node in root.walk()]
    entries = [entry for node in nodes for entry in node.entries]
    pages = {entry.page: entry for entry in entries if entry.page is not None}
    slots = {entry.slot for entry in entries if entry.slot is not None}
    paths = Counter(node for way in ways.values() for node in (way.root, *way.path))
    tails = Counter(way.tail for way in ways.values() if way.tail is not None)
    wanted = Counter(node for nodes in cache.wanted.values() for node in nodes)
    full = [group for group, window in enumerate(layout.windows) if window is None]
    most = layout.most_blocks
    accounts = {
        "held": {seq for seq in holders if seq.block_tables} == set(ways),
        "references": all(entry.refs == held[page] for page, entry in pages.items()),
        "pages of one sequence": all(n == 1 for page, n in held.items() if page not in pages),
        "pages of one node": len(pages) == sum(entry.page is not None for entry in entries),
        "idle": set(store.idle) == {entry for entry in pages.values() if not entry.refs},
        "free pages": store.pool.num_used == len(pages.keys() | held.keys()),
        "ways": all(node.holders == paths[node] + tails[node] for node in nodes),
        "waiters": all(node.waiters == wanted[node] for node in nodes),
        "uncomputed": all(node.owner is None or node.owner in ways for node in nodes),
        "use": all(node.is_of_use for node in nodes),
        "budgets": most is None or all(_num_held(s, g) <= most for s in ways for g in full),
        "slots": len(slots) == sum(entry.slot is not None for entry in entries),
        "host": store.host is None or store.host.num_used == len(slots),
    }
    if wrong := [name for name, ok in accounts.items() if not ok]:
        raise RuntimeError(f"the cache's accounts are off: {', '.join(wrong)}")


def _num_held(seq: Sequence, group: int) -> int:
    lists = [seq.block_tables[group], *([seq.kept_pages[group]] if seq.kept_pages else [])]
    return sum(len(pages) - pages.count(GONE) for pages in lists)
