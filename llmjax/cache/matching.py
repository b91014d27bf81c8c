"""What of a waiting sequence is there already, and what it would take to admit it."""

from __future__ import annotations

from typing import NamedTuple

from ..request import Sequence
from .layout import KVLayout
from .page_store import PageStore
from .radix_tree import Node, common


class Match(NamedTuple):
    """What of a waiting sequence is there already.

    Attributes:
        nodes: whole pages from its start.
        source: the page whose first tokens come next, to be copied; or None.
        num_tokens: in all.
        owner: the sequence that is about to compute what comes next, if there is one.
    """

    nodes: list[Node]
    source: Node | None
    num_tokens: int
    owner: Sequence | None = None


class Matcher:
    """Looks up sequences in the tree. Takes nothing.

    Args:
        chunk: most tokens of one sequence in a step.
    """

    def __init__(self, layout: KVLayout, store: PageStore, chunk: int):
        self.layout = layout
        self.store = store
        self.chunk = chunk

    def match(self, root: Node, seq: Sequence) -> Match:
        """What of a waiting sequence's tokens need not be computed. Takes nothing."""
        size, tokens = self.layout.block_size, seq.tokens
        limit = self.layout.whole(_reusable(seq))
        node = root
        path: list[Node] = []
        owner: Sequence | None = None
        for end in range(size, limit + 1, size):
            child = node.child(tuple(tokens[end - size : end]))
            if child is None or child.owner is not None:
                owner = child.owner if child is not None else None
                break
            path.append(child)
            node = child
        usable = self._usable(path)
        if usable < len(path):
            return Match(path[:usable], None, usable * size)
        start = len(path) * size
        whole = Match(path, None, start, owner)
        if owner is not None or start >= limit:
            return whole
        source, count, owner = self._branch(node, tokens[start : min(limit, start + size)])
        if source is None:
            return whole._replace(owner=owner)
        # It must stay until it is copied, and others' pages come first.
        room = self.store.num_available - self.needed(seq, whole)
        if sum(not e.refs and e.page is not None for e in source.entries) > room:
            return whole
        return Match(path, source, start + count)

    def _usable(self, path: list[Node]) -> int:
        """How many of these nodes can be had in all groups that a next token reads."""
        size, best = self.layout.block_size, 0
        runs = [0] * self.layout.num_groups
        for i, node in enumerate(path, 1):
            for group, entry in enumerate(node.entries):
                runs[group] = runs[group] + 1 if self.store.is_there(entry) else 0
            firsts = (self.layout.first_block(g, i * size) for g in range(len(runs)))
            if all(run >= i - first for run, first in zip(runs, firsts, strict=True)):
                best = i
        return best

    def _branch(self, node: Node, rest: list[int]) -> tuple[Node | None, int, Sequence | None]:
        """The child that goes on longest like `rest`, and how long; or who is to compute it."""
        least = max(1, self.layout.block_size // 8)  # a copy takes longer than a token or two
        best, most = None, least - 1
        for child in node.branches(rest[0]):
            if (count := common(child.tokens, rest)) <= most:
                continue
            if child.owner is not None:
                if count == len(rest):
                    return None, 0, child.owner
            elif all(map(self.store.is_there, child.entries)):
                best, most = child, count
        return best, most if best else 0, None

    def needed(self, seq: Sequence, match: Match, end: int | None = None) -> int:
        """Available pages that admission takes, with pages for the tokens before `end`."""
        count, pages = len(seq.tokens) if end is None else end, 0
        for group in range(self.layout.num_groups):
            first = self.layout.first_block(group, match.num_tokens)
            entries = (node.entries[group] for node in match.nodes[first:])
            pages += self.more(group, count, len(match.nodes))
            pages += sum(not entry.refs for entry in entries)
        return pages

    def more(self, group: int, num_tokens: int, blocks: int) -> int:
        """Pages of a group that one of so many tokens takes beside the first `blocks`."""
        layout = self.layout
        if layout.windows[group] is None:
            return max(0, layout.num_blocks(layout.whole(num_tokens)) - blocks)
        more = max(0, layout.num_blocks(num_tokens) - blocks)
        return min(more, layout.num_blocks(self.chunk) + 1)


def _reusable(seq: Sequence) -> int:
    """Tokens that a match may cover: not the last, whose logits are wanted; nor those that
    the log-probabilities of the prompt still need."""
    limit = len(seq.tokens) - 1
    if seq.request.params.prompt_logprobs is not None and not seq.index:
        limit = min(limit, seq.num_prompt_logprobs)
    return limit
