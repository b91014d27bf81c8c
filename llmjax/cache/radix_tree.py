"""What pages hold, by the tokens that lead there: a tree with one page's tokens a node.

Pure accounting. A node's keys and values are those of its tokens behind all tokens on the way
from the root; each root stands for one way to compute them (model, adapter, salt).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from ..request import Sequence

MOST_LOOKED_AT = 64
"""Children that are compared with a branch; the latest."""


class Entry:
    """One group's keys and values of a node: on the device, in host memory, or nowhere.

    Attributes:
        page: of the device's pool.
        slot: of the host's pool.
        refs: sequences that hold the page.
    """

    __slots__ = ("node", "page", "refs", "slot")

    def __init__(self, node: Node, page: int | None = None, refs: int = 0):
        self.node = node
        self.page = page
        self.slot: int | None = None
        self.refs = refs

    @property
    def is_empty(self) -> bool:
        return self.page is None and self.slot is None


class Node:
    """The tokens of one page, or, at a leaf, of the beginning of one; a root has its key.

    Attributes:
        owner: the sequence that will compute it, until the step that does so is planned.
        holders: sequences on whose way it lies.
        waiters: preempted sequences that will want it again.
        hits: sequences that found it there; of a root, all that began.
    """

    __slots__ = ("children", "entries", "hits", "holders", "owner", "parent", "tokens", "waiters")

    def __init__(
        self,
        parent: Node | None,
        tokens: tuple[Any, ...],
        num_groups: int,
        owner: Sequence | None = None,
    ):
        self.parent = parent
        self.tokens = tokens
        self.owner = owner
        self.entries = tuple([Entry(self) for _ in range(num_groups)])
        self.holders = 0
        self.waiters = 0
        self.hits = 0
        # By first token, then by all: a branch within a page is looked for by the first.
        self.children: dict[int, dict[tuple[int, ...], Node]] = {}

    @property
    def is_of_use(self) -> bool:
        """Whether it, or what is below it, holds anything or is being computed."""
        held = self.children or self.holders
        return bool(held) or any(not entry.is_empty for entry in self.entries)

    def child(self, tokens: tuple[int, ...]) -> Node | None:
        return self.children.get(tokens[0], {}).get(tokens)

    def add(self, tokens: tuple[int, ...], owner: Sequence | None = None) -> Node:
        """A new child, of which there is none of these tokens yet."""
        node = Node(self, tokens, len(self.entries), owner)
        self.children.setdefault(tokens[0], {})[tokens] = node
        return node

    def branches(self, first: int) -> Iterator[Node]:
        """The latest children that begin with this token."""
        return islice(reversed(self.children.get(first, {}).values()), MOST_LOOKED_AT)

    @property
    def is_detached(self) -> bool:
        return self.parent is not None and self.parent.child(self.tokens) is not self

    def detach(self) -> None:
        """Takes the node out of the tree."""
        assert self.parent is not None
        alike = self.parent.children[self.tokens[0]]
        del alike[self.tokens]
        if not alike:
            del self.parent.children[self.tokens[0]]

    def prune(self) -> Node:
        """Takes the node and those above it out, up to one that is of use, which it returns."""
        node = self
        while node.parent is not None and not node.is_of_use and not node.is_detached:
            node.detach()
            node = node.parent
        return node

    def walk(self) -> Iterator[Node]:
        """All nodes below."""
        stack = [self]
        while stack:
            below = [n for alike in stack.pop().children.values() for n in alike.values()]
            yield from below
            stack += below


def common(a: tuple[int, ...] | list[int], b: tuple[int, ...] | list[int]) -> int:
    """How many leading tokens are the same."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
