"""Which replica runs a request: the one where that costs least. Pure Python.

The cost is counted in tokens to compute: twice what of the prompt the replica does not have, as
the request waits for it and so do those that come behind; what is queued there; `SEQUENCE` for
each sequence that lives there; and the tokens for which pages are missing. So a prompt goes where
most of it is cached, until that replica has so much more to do than another that it pays to
compute the prompt once more; from then on both have it. After the costs of Srivatsa et al.,
"Preble: Efficient Distributed Prompt Scheduling for LLM Serving" (2024), which are in seconds.

What is on its way to the cache counts as there: the prompts of all requests placed on a replica
that have not ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..request import Request, SequenceDelta

SEQUENCE = 32
"""Tokens of a prompt that take as long as a sequence makes another wait, step by step, on its way
to its end."""


class Replica(Protocol):
    """What is asked of one."""

    def cached(self, request: Request) -> int:
        """Tokens of its prompt that the prefix cache has."""

    @property
    def room(self) -> int:
        """Tokens for which there are pages to be had."""


@dataclass
class Place:
    """Where a request runs.

    Attributes:
        tokens: that are to be computed of its prompt; 0 once an output has come.
        blocks: one key for each whole page of its prompt.
        open: choices that have not ended.
    """

    replica: int
    tokens: int
    blocks: list[int]
    open: int


class Placement:
    """Places requests on replicas, and follows them to their ends.

    Args:
        block_size: tokens in a page.
        reuse: whether replicas have prefix caches.
    """

    def __init__(self, replicas: Sequence[Replica], *, block_size: int, reuse: bool = True):
        self._replicas = replicas
        self._block_size = block_size
        self._reuse = reuse
        self._placed: dict[str, Place] = {}
        self._num_placed = [0] * len(replicas)
        self._blocks: list[Counter[int]] = [Counter() for _ in replicas]
        self.queued = [0] * len(replicas)
        self.live = [0] * len(replicas)

    def choose(self, request: Request) -> Place:
        """Where a request is to run: of equal replicas at that which was given fewest."""
        keys = list(self._keys(request))
        found = self._found(request, keys)
        tokens = [len(request.prompt_token_ids) - there for there in found]
        number = min(
            range(len(self._replicas)),
            key=lambda i: (self._cost(i, tokens[i]), self._num_placed[i]),
        )
        return Place(number, tokens[number], keys, request.params.n)

    def take(self, request: Request, place: Place) -> None:
        """Notes that a request has been queued there."""
        self._placed[request.id] = place
        self._num_placed[place.replica] += 1
        self._blocks[place.replica].update(place.blocks)
        self.queued[place.replica] += place.tokens
        self.live[place.replica] += place.open

    def follow(self, deltas: Sequence[SequenceDelta]) -> None:
        """Takes note of what requests have come to."""
        for delta in deltas:
            placed = self._placed.get(delta.request_id)
            if placed is None:
                continue
            self.queued[placed.replica] -= placed.tokens
            placed.tokens = 0
            if delta.finish_reason is None:
                continue
            self.live[placed.replica] -= 1
            placed.open -= 1
            if not placed.open:
                del self._placed[delta.request_id]
                self._forget(placed)

    def _forget(self, placed: Place) -> None:
        blocks = self._blocks[placed.replica]
        for key in placed.blocks:
            blocks[key] -= 1
            if not blocks[key]:
                del blocks[key]

    def _cost(self, replica: int, tokens: int) -> int:
        """Of a request of whose prompt so many tokens are to be computed there."""
        ahead = self.queued[replica] + tokens
        missing = max(0, ahead - self._replicas[replica].room)
        return ahead + tokens + missing + SEQUENCE * self.live[replica]

    def _found(self, request: Request, keys: list[int]) -> list[int]:
        """Of each replica, tokens of a prompt that it has or is about to have."""
        if not self._reuse:
            return [0] * len(self._replicas)
        most, found = len(request.prompt_token_ids) - 1, []
        for replica, blocks in zip(self._replicas, self._blocks, strict=True):
            known = next((i for i, key in enumerate(keys) if key not in blocks), len(keys))
            found.append(min(most, max(known * self._block_size, replica.cached(request))))
        return found

    def _keys(self, request: Request) -> Iterator[int]:
        """One for each whole page of the prompt, of all tokens up to its end."""
        size, tokens = self._block_size, request.prompt_token_ids
        key: Hashable = request.kv_key
        for end in range(size, len(tokens) + 1 if self._reuse else 0, size):
            key = hash((key, *tokens[end - size : end]))
            yield key
