"""What an engine holds and runs at a moment, for people to look at: no text, and of bounded size.

Taken by the engine's own thread between two steps; nothing is changed.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from heapq import nlargest
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cache.manager import GONE, KVCache
from ..cache.radix_tree import Node
from ..request import Sequence

if TYPE_CHECKING:
    from .engine import Engine

MOST_CELLS = 4096
"""Cells of the page map; where there are more pages a cell stands for several."""
MOST_SEQUENCES = 256
MOST_WAITING = 64
MOST_BRANCHES = 400
MOST_CHILDREN = 12
MOST_VISITED = 5000
"""Nodes of the prefix tree that are looked at."""

FREE, CACHED, SHARED, OWNED = range(4)
"""Cells: of several sequences (or of one that is not listed), or OWNED + its place in the list."""

_SALT = secrets.randbits(48)


def take_snapshot(engine: Engine) -> dict[str, Any]:
    """Numbers, the page map, what runs and waits, and the top of the prefix tree.

    Returns:
        As JSON has it. "pages": {"size" (pages in a cell), "cells"}; "running" and "waiting": a
        dict a sequence; "tree": see `prefix_tree`.
    """
    scheduler, now = engine.scheduler, time.monotonic()
    running = scheduler.running[:MOST_SEQUENCES]
    return {
        "model": engine.config.model.name,
        "max_model_len": engine.max_model_len,
        "block_size": engine.layout.block_size,
        "groups": engine.layout.num_groups,
        "num_pages": engine.num_pages,
        "steps": engine.num_steps,
        "stats": asdict(engine.stats()),
        "pages": page_map(engine.cache, running),
        "running": [_describe(seq, now) for seq in running],
        "waiting": [_describe(seq, now) for seq in scheduler.first_waiting(MOST_WAITING)],
        "tree": prefix_tree(engine.cache),
    }


def _describe(seq: Sequence, now: float) -> dict[str, Any]:
    request = seq.request
    return {
        "id": f"{request.id}.{seq.index}" if request.params.n > 1 else request.id,
        "arrival": seq.arrival,
        "prompt_tokens": seq.prompt_len,
        "computed": min(seq.num_computed, seq.prompt_len),
        "cached": seq.num_cached_tokens,
        "output_tokens": seq.output_len,
        "max_tokens": request.params.max_tokens,
        "pages": sum(len(pages) - pages.count(GONE) for pages in seq.page_lists),
        "forgotten": seq.num_dropped,
        "priority": request.options.priority,
        "preemptions": seq.num_preemptions,
        "age": round(now - request.arrival_time, 3),
    }


def page_map(cache: KVCache, listed: Iterable[Sequence]) -> dict[str, Any]:
    """Who holds each page, or most of each cell's pages."""
    count, idle = cache.pool.num_blocks, cache.store.idle
    codes, holders = np.full(count, FREE, np.int32), np.zeros(count, np.int32)
    codes[np.fromiter((entry.page for entry in idle), np.int64, len(idle))] = CACHED
    places = {seq: OWNED + place for place, seq in enumerate(listed)}
    for seq in cache.ways:
        for listed_pages in seq.page_lists:
            pages = np.array(listed_pages, np.int64)
            pages = pages[pages != GONE]
            codes[pages] = places.get(seq, SHARED)
            holders[pages] += 1
    codes[holders > 1] = SHARED
    size = -(-count // MOST_CELLS)
    if size > 1:
        rows = np.full((-(-count // size), size), -1, np.int32)
        rows.reshape(-1)[:count] = codes
        used, cached, free = (
            match.sum(1) for match in (rows >= SHARED, rows == CACHED, rows == FREE)
        )
        rest = np.where(cached >= free, CACHED, FREE)
        codes = np.where(used >= np.maximum(cached, free), rows.max(1), rest)
    return {"size": size, "cells": codes.tolist()}


def prefix_tree(cache: KVCache) -> list[dict[str, Any]]:
    """The branches of the prefix cache that were hit most, from the roots down.

    Returns:
        A dict a branch, which is a run of nodes without a fork: its "tokens" and nodes, how many
        of these the "device" and the "host" have, "hits" of its first node, sequences "running"
        through it, its "children" and how many "more" of these there are. "cut": it goes on.
    """
    top: dict[str, Any] = {"children": [], "more": len(cache.roots)}
    queue: deque[tuple[dict[str, Any], Iterable[Node]]] = deque([(top, cache.roots.values())])
    branches, budget = 0, MOST_VISITED
    while queue:
        parent, below = queue.popleft()
        best = nlargest(MOST_CHILDREN, below, key=lambda node: (node.hits, node.holders))
        for node in best:
            if branches == MOST_BRANCHES or budget <= 0:
                break
            branches += 1
            branch, end = _branch(node, budget)
            budget -= branch["nodes"]
            parent["children"].append(branch)
            parent["more"] -= 1
            queue.append((branch, _children(end)))
    return top["children"]


def _branch(first: Node, budget: int) -> tuple[dict[str, Any], Node]:
    """What is told of a run of nodes that begins with `first`, and the last of them."""
    node, nodes = first, [first]
    while len(nodes) < budget and _num_children(node) == 1:
        (child,) = _children(node)
        # A root has no tokens; and where fewer came by, others have left from there.
        if child.hits != first.hits or child.holders != first.holders or node.parent is None:
            break
        node = child
        nodes.append(node)
    entries = [node.entries for node in nodes]
    return {
        "key": f"{(id(first) ^ _SALT) & 0xFFFFFFFFFFFF:x}",
        "tokens": sum(len(node.tokens) for node in nodes) if first.parent is not None else 0,
        "nodes": len(nodes),
        "device": sum(any(entry.page is not None for entry in group) for group in entries),
        "host": sum(any(entry.slot is not None for entry in group) for group in entries),
        "hits": first.hits,
        "running": first.holders,
        "children": [],
        "more": _num_children(node),
        "cut": len(nodes) >= budget,
    }, node


def _children(node: Node) -> Iterator[Node]:
    return (child for alike in node.children.values() for child in alike.values())


def _num_children(node: Node) -> int:
    return sum(map(len, node.children.values()))
