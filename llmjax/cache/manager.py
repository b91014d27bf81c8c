"""The pages of all sequences: who holds which, and what is remembered. No device.

A sequence's first pages are those of the nodes on its way through the tree (`Way.path`); the
pages behind are its own until they are full and known. A prompt's full pages are in the tree
from its admission on, before they are computed (`Node.owner`): another sequence that begins
alike can wait for them instead of computing the same. Of a page where two sequences part in
the middle, the second one takes a copy.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain

from ..request import Request, Sequence
from .block_pool import BlockPool
from .evictor import Evictor
from .host_pool import HostPool
from .layout import KVLayout
from .matching import Match, Matcher
from .page_store import CacheStats, PageStore, Transfer
from .radix_tree import Node
from .way import GONE, Way


class KVCache:
    """Hands out the pages of `pool`.

    Args:
        enable_prefix_caching: remember what sequences computed once they have ended. Choices
            of one request share their prompt in any case.
        host: where pages may go to; None drops them.
        chunk: most tokens of one sequence in a step.
    """

    def __init__(
        self,
        pool: BlockPool,
        layout: KVLayout,
        *,
        enable_prefix_caching: bool = True,
        host: HostPool | None = None,
        chunk: int = 512,
    ):
        self.layout = layout
        self.enable_prefix_caching = enable_prefix_caching
        self.chunk = chunk
        self.store = PageStore(pool, host, on_empty=self.prune)
        self._matcher = Matcher(layout, self.store, chunk)
        self._evictor = Evictor(layout, self.store)
        self.roots: dict[Hashable, Node] = {}
        self.ways: dict[Sequence, Way] = {}
        self.wanted: dict[Sequence, list[Node]] = {}

    # How much there is

    @property
    def pool(self) -> BlockPool:
        return self.store.pool

    @property
    def host(self) -> HostPool | None:
        return self.store.host

    @property
    def stats(self) -> CacheStats:
        return self.store.stats

    @property
    def num_available(self) -> int:
        """Pages that could be had: free or idle."""
        return self.store.num_available

    @property
    def num_used(self) -> int:
        """Pages that sequences hold."""
        return self.pool.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """Idle pages."""
        return len(self.store.idle)

    def num_held(self, seq: Sequence) -> int:
        """Pages that nobody else holds and that would come back."""
        way = self.ways.get(seq)
        if way is None:
            return 0
        shared = sum(
            page != GONE and node.entries[group].refs > 1
            for group, table in enumerate(seq.block_tables)
            for node, page in zip(way.path, table, strict=False)
        )
        return sum(len(pages) - pages.count(GONE) for pages in seq.page_lists) - shared

    def match(self, seq: Sequence) -> Match:
        """What of a waiting sequence's tokens need not be computed. Takes nothing."""
        return self._matcher.match(self.root_of(seq), seq)

    def cached(self, request: Request) -> int:
        """How many tokens of a prompt are there. Takes nothing, and leaves no trace."""
        root = self.roots.get(request.kv_key) if self.enable_prefix_caching else None
        if root is None:
            return 0
        seq = Sequence(request, 0, 0, request.prompt_token_ids)
        return self._matcher.match(root, seq).num_tokens

    def needed(self, seq: Sequence, match: Match, end: int | None = None) -> int:
        """Available pages that admission takes, with pages for the tokens before `end`."""
        return self._matcher.needed(seq, match, end)

    def missing(self, seq: Sequence) -> int:
        """Available pages that a sequence which was admitted with pages for a part of its tokens
        lacks for the others, as `needed` counts them."""
        return sum(
            self._matcher.more(group, len(seq.tokens), len(table))
            for group, table in enumerate(seq.block_tables)
        )

    # A sequence's way

    def admit(self, seq: Sequence, match: Match, end: int | None = None) -> bool:
        """Gives a sequence the pages of its tokens before `end`, by default all; of a window,
        those it starts with; of what will be evicted, those it holds before.

        `seq.num_computed` becomes what is there already. False, and nothing taken, where
        there are not enough pages.
        """
        if self.needed(seq, match, end) > self.num_available:
            return False
        layout, store, start = self.layout, self.store, match.num_tokens
        self.unwant(seq)
        firsts = [layout.first_block(group, start) for group in range(layout.num_groups)]
        way = Way(self.root_of(seq), list(match.nodes), len(match.nodes), firsts)
        for node in (way.root, *way.path):
            node.holders += 1
            node.hits += not seq.num_preemptions
        entries = [[n.entries[g] for n in way.path[first:]] for g, first in enumerate(firsts)]
        source = match.source.entries if match.source is not None else ()
        # All of it is held before any page is taken, which may be at the cost of idle ones.
        for entry in chain(*entries, source):
            store.hold(entry)
        seq.block_tables = [
            [GONE] * first + [store.page_of(entry) for entry in part]
            for first, part in zip(firsts, entries, strict=True)
        ]
        self.ways[seq] = way
        if store.on_decision is not None:
            self._tell_recomputed(seq, way.end, start)
        self._remember_prompt(seq, way)
        whole = layout.whole(len(seq.tokens) if end is None else end)
        for group, window in enumerate(layout.windows):
            until = whole if window is None else start + 1
            self._lengthen(seq, way, group, layout.num_blocks(until))
        for entry, table in zip(source, seq.block_tables, strict=False):
            store.copy(entry, table[start // layout.block_size])
            store.drop(entry)
        if match.source is not None:
            self.prune(match.source)
        seq.num_computed = start
        if not seq.num_preemptions:
            seq.num_cached_tokens = max(0, start - seq.num_brought)
            self.stats.queried += len(seq.tokens)
            self.stats.hit += seq.num_cached_tokens
        return True

    def complete(self, seq: Sequence) -> None:
        """Gives a sequence the pages that it is `missing`, which are to be had; of a window it
        takes them as it goes on."""
        blocks = self.layout.num_blocks(self.layout.whole(len(seq.tokens)))
        for group, window in enumerate(self.layout.windows):
            if window is None:
                self._lengthen(seq, self.ways[seq], group, blocks)

    def extend(self, seq: Sequence, start: int, end: int) -> bool:
        """Pages for the positions from `start` on to before `end`; what no later token reads
        goes back. False, and nothing taken, where there are not enough pages."""
        layout, way, tables = self.layout, self.ways[seq], seq.block_tables
        blocks = layout.num_blocks(end)
        leaving = self._evictor.due(seq, way, start)
        missing = leaving.taken - leaving.freed if leaving is not None else 0
        for group, window in enumerate(layout.windows):
            if window is not None:
                self._drop_before(seq, way, group, layout.first_block(group, start))
            missing += max(0, blocks - len(tables[group]))
        if leaving is None and not missing:
            return True
        if missing > self.num_available:
            return False
        if leaving is not None:
            self._evictor.carry_out(seq, way, start, leaving)
        for group in range(layout.num_groups):
            self._lengthen(seq, way, group, blocks)
        return True

    def advance(self, seq: Sequence) -> None:
        """Remembers what the steps planned so far compute of a sequence."""
        way, size = self.ways[seq], self.layout.block_size
        known = self._num_known(seq)
        while way.num_ready < len(way.path) and (way.num_ready + 1) * size <= known:
            way.path[way.num_ready].owner = None
            way.num_ready += 1
        if way.closed or way.num_ready < len(way.path):
            return
        while (len(way.path) + 1) * size <= known and not way.closed:
            self._remember_block(seq, way)
        at = len(way.path) * size
        if way.tail is None and at < seq.prompt_len <= known and not way.closed:
            self._remember_tail(seq, way, tuple(seq.tokens[at : seq.prompt_len]))

    def release(self, seq: Sequence, *, wants_back: bool = False) -> None:
        """Takes back all pages of a sequence that no step in flight includes.

        Args:
            wants_back: it was preempted and will go on.
        """
        way = self.ways.pop(seq, None)
        if way is None:
            return
        self._forget_uncomputed(way)
        nodes = self._remember_rest(seq, way)
        if way.tail is not None:
            nodes.append(way.tail)
            way.tail.holders -= 1
        for node in (way.root, *way.path):
            node.holders -= 1
        if wants_back:
            self.want(seq, nodes)
        tables, seq.block_tables = seq.block_tables, []
        self.pool.free(chain(*seq.kept_pages))
        seq.kept_pages, seq.num_dropped = [], 0
        # The last page goes first when room is needed.
        for i in range(max(map(len, tables), default=0) - 1, -1, -1):
            for group, table in enumerate(tables):
                if i >= len(table) or table[i] == GONE:
                    continue
                entry = nodes[i].entries[group] if i < len(nodes) else None
                if entry is not None and entry.page == table[i]:
                    self.store.drop(entry)
                else:
                    self.pool.free([table[i]])
        for node in (*reversed(nodes), way.root):
            self.prune(node)

    def forget(self, seq: Sequence, *, is_last: bool) -> None:
        """A sequence has ended, and holds nothing any more.

        Args:
            is_last: of its request.
        """
        self.unwant(seq)
        if is_last and not self.enable_prefix_caching:
            self._clear(self.roots.pop(self._key(seq), None))

    def reset(self) -> None:
        """Forgets all that nobody holds."""
        for root in list(self.roots.values()):
            self._clear(root)

    def want(self, seq: Sequence, nodes: list[Node]) -> None:
        """A waiting sequence will want these: what they hold goes after all else."""
        for node in nodes:
            node.waiters += 1
        self.wanted[seq] = nodes

    def unwant(self, seq: Sequence) -> None:
        for node in self.wanted.pop(seq, ()):
            node.waiters -= 1

    def take_transfers(self) -> list[Transfer]:
        """What the device is to copy before its next step, in this order."""
        transfers, self.store.transfers = self.store.transfers, []
        return transfers

    # Inside

    def _key(self, seq: Sequence) -> Hashable:
        return seq.request.kv_key if self.enable_prefix_caching else seq.request.id

    def root_of(self, seq: Sequence) -> Node:
        """Where the tree of all begins that may share pages with this sequence."""
        key = self._key(seq)
        if key not in self.roots:
            self.roots[key] = Node(None, (key,), self.layout.num_groups)
        return self.roots[key]

    def _num_known(self, seq: Sequence) -> int:
        """Tokens whose keys and values may be remembered: nothing was evicted before them."""
        return self.layout.whole(min(seq.num_computed, len(seq.tokens)))

    def prune(self, node: Node) -> None:
        """Takes a node, and those above it, out of the tree where nothing needs them."""
        top = node.prune()
        if top.parent is None and not top.is_of_use:
            self.roots.pop(top.tokens[0], None)

    def _clear(self, root: Node | None) -> None:
        nodes = list(root.walk()) if root is not None else []
        for node in nodes:
            for entry in node.entries:
                if not entry.refs:
                    self.store.clear(entry)
        for node in reversed(nodes):
            self.prune(node)

    def _tell_recomputed(self, seq: Sequence, node: Node | None, start: int) -> None:
        """What a sequence computes from `start` on although host memory has it."""
        size, tell = self.layout.block_size, self.store.on_decision
        for at in range(start // size * size, len(seq.tokens) - size + 1, size):
            node = node.child(tuple(seq.tokens[at : at + size])) if node is not None else None
            if node is None or tell is None:
                return
            if any(entry.page is None and entry.slot is not None for entry in node.entries):
                tell(self.store.weigh_loading(node, "recompute"))

    def _lengthen(self, seq: Sequence, way: Way, group: int, blocks: int) -> None:
        table = seq.block_tables[group]
        while (i := len(table)) < blocks:
            table.append(self.store.take())
            if i < len(way.path):
                self.store.give(way.path[i].entries[group], table[i])

    def _drop_before(self, seq: Sequence, way: Way, group: int, first: int) -> None:
        table = seq.block_tables[group]
        for i in range(way.first_held[group], min(first, len(table))):
            way.drop(self.store, group, table, i)
            way.first_held[group] = i + 1

    def _remember_prompt(self, seq: Sequence, way: Way) -> None:
        """Puts the nodes of full pages that are still to be computed into the tree."""
        size, tokens = self.layout.block_size, seq.tokens
        for at in range(len(way.path) * size, self.layout.whole(len(tokens)) - size + 1, size):
            block = tuple(tokens[at : at + size])
            if way.end.child(block) is not None:
                way.closed = True
                return
            node = way.end.add(block, owner=seq)
            node.holders += 1
            way.path.append(node)

    def _remember_block(self, seq: Sequence, way: Way) -> None:
        """Puts the node of the next page, full and known, into the tree."""
        i, size = len(way.path), self.layout.block_size
        way.forget_tail()
        block = tuple(seq.tokens[i * size : (i + 1) * size])
        if way.end.child(block) is not None:
            way.closed = True
            return
        node = way.end.add(block)
        node.holders += 1
        self._fill(seq, node, i)
        way.path.append(node)
        way.num_ready += 1

    def _remember_tail(self, seq: Sequence, way: Way, tokens: tuple[int, ...]) -> None:
        block = len(way.path)
        # A page that was given back would be another's once that one remembers its own there.
        is_whole = all(table[block] != GONE for table in seq.block_tables)
        if is_whole and way.end.child(tokens) is None:
            way.tail = way.end.add(tokens)
            way.tail.holders += 1
            self._fill(seq, way.tail, block)

    def _fill(self, seq: Sequence, node: Node, block: int) -> None:
        """Gives a node the pages of a sequence's block, where it has none itself."""
        for entry, table in zip(node.entries, seq.block_tables, strict=True):
            if entry.page is None and table[block] != GONE:
                self.store.give(entry, table[block])

    def _forget_uncomputed(self, way: Way) -> None:
        for node in reversed(way.path[way.num_ready :]):
            for entry in node.entries:
                entry.page, entry.refs = None, 0
            node.detach()
        del way.path[way.num_ready :]

    def _remember_rest(self, seq: Sequence, way: Way) -> list[Node]:
        """The nodes of all that a sequence has computed, its own pages put into the tree.

        Where another's page is there already it stays, and this one is of no more use.
        """
        nodes, size = list(way.path), self.layout.block_size
        if not self.enable_prefix_caching and seq.finish_reason is not None:
            return nodes
        known = self._num_known(seq)
        first = len(nodes)
        if known > max(first * size, seq.prompt_len - 1):
            way.forget_tail()
        node = way.end
        for at in range(first * size, known, size):
            block = tuple(seq.tokens[at : min(at + size, known)])
            node = node.child(block) or node.add(block)
            if node.owner is not None:
                break  # another sequence is about to compute it
            self._fill(seq, node, at // size)
            nodes.append(node)
        return nodes
