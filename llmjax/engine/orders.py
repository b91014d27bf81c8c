"""What a leader has other processes do: all that its own device gets from the host, as messages.

Every process holds the same weights, state and programs, each its part of them. So the host's few
thousand integers a step are all that travels; what follows from them is computed everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from ..cache.page_store import Condense, Copy, Load, Save, Transfer
from ..errors import GroupError
from ..request import MAX_LOGIT_BIAS
from .batch import BiasRow, PackedStep, SlotTable, Writes, head_sizes
from .buckets import Bucket

_MOVES = (Copy, Save, Load)
_CONDENSE = len(_MOVES)
_STEP, _SAMPLE, _SCORE, _STOP = range(4)


@dataclass
class StepOrder:
    """A step, and what happens on the device before it, in this order.

    Attributes:
        biases: rows of the device's bias table, by slot.
        histories: tokens of sequences that go on from what is cached, by slot.
        transfers: of pages.
        packed: the step's data.
    """

    biases: list[tuple[int, BiasRow]]
    histories: list[tuple[int, list[int]]]
    transfers: list[Transfer]
    bucket: Bucket
    packed: PackedStep


class SampleOrder(NamedTuple):
    """The sampler of the newest step.

    Attributes:
        rows: that may not have all tokens next; the others may.
        masks: of each of them, as `sample` takes them.
    """

    rows: list[int]
    masks: Int[np.ndarray, "n words"]


class ScoreOrder(NamedTuple):
    """Log-probabilities of prompt tokens, by the oldest step that is not collected yet.

    Attributes:
        begin: the first of the step's tokens that predict them.
        targets: the tokens.
    """

    begin: int
    targets: list[int]


class Stop(NamedTuple):
    """The end. `reason` is what went wrong, or nothing."""

    reason: str


Order = StepOrder | SampleOrder | ScoreOrder | Stop


def digest(token_ids: ArrayLike) -> int:
    """Of a step's sampled tokens."""
    return zlib.crc32(np.ascontiguousarray(token_ids, np.int32).tobytes())


def encode(order: Order, slots: SlotTable, digests: Sequence[int]) -> bytes:
    """An order as a message: int32 arrays, one behind the other, after their sizes.

    Args:
        slots: the leader's, of whose changes the others are told.
        digests: of the steps that were collected since the last message.
    """
    match order:
        case StepOrder():
            biases = [bias for _, bias in order.biases]
            sizes = head_sizes(order.bucket, slots.num_groups)
            parts = [
                [_STEP, *order.bucket],
                *(part[:size] for part, size in zip(order.packed, sizes, strict=True)),
                *slots.take_writes(),
                [slot for slot, _ in order.biases],
                *([bias[i] for bias in biases] for i in range(len(BiasRow._fields))),
                [n for slot, tokens in order.histories for n in (slot, len(tokens), *tokens)],
                list(chain.from_iterable(map(_numbers, order.transfers))),
            ]
        case SampleOrder():
            parts = [[_SAMPLE], order.rows, order.masks]
        case ScoreOrder():
            parts = [[_SCORE, order.begin], order.targets]
        case Stop():
            parts = [[_STOP], list(order.reason.encode())]
    arrays = [_flat(part) for part in (np.array(digests, np.uint32).view(np.int32), *parts)]
    lengths = np.array([len(arrays), *map(len, arrays)], np.int32)
    return b"".join(array.tobytes() for array in (lengths, *arrays))


def decode(message: bytes, slots: SlotTable) -> tuple[Order, list[int]]:
    """What `encode` was given; `slots` becomes what the leader's is.

    Raises:
        GroupError: a message of a kind that there is not.
    """
    flat = np.frombuffer(message, np.int32)
    starts = 1 + flat[0] + np.cumsum([0, *flat[1 : flat[0]]])
    digests, (kind, *numbers), *parts = np.split(flat, starts)[1:]
    order: Order
    if kind == _STEP:
        order = _decode_step(Bucket(*map(int, numbers)), slots, *parts)
    elif kind == _SAMPLE:
        rows, masks = parts
        order = SampleOrder(rows.tolist(), masks.reshape(len(rows), -1) if len(rows) else masks)
    elif kind == _SCORE:
        order = ScoreOrder(int(numbers[0]), parts[0].tolist())
    elif kind == _STOP:
        order = Stop(bytes(parts[0].tolist()).decode())
    else:
        raise GroupError(f"a message of kind {kind}, allowed: 0 to {_STOP}")
    return order, digests.view(np.uint32).tolist()


def _decode_step(
    bucket, slots, head, rows_head, rows, pages, bias_slots, ids, values, until, told, moves
) -> StepOrder:
    wide = (len(bias_slots), MAX_LOGIT_BIAS)
    biases = map(
        BiasRow, ids.reshape(wide), values.view(np.float32).reshape(wide), until.reshape(wide)
    )
    histories, at = [], 0
    while at < len(told):
        end = at + 2 + told[at + 1]
        histories.append((int(told[at]), told[at + 2 : end].tolist()))
        at = end
    return StepOrder(
        list(zip(bias_slots.tolist(), biases, strict=True)),
        histories,
        list(_transfers(iter(moves.tolist()), slots.num_groups)),
        bucket,
        slots.repack(
            bucket, PackedStep(head, rows_head), Writes(rows.reshape(-1, slots.row_size), pages)
        ),
    )


def _numbers(transfer: Transfer) -> list[int]:
    """A transfer as `_transfers` reads it."""
    if isinstance(transfer, Condense):
        lists = (*transfer.sources, *transfer.targets)
        return [_CONDENSE, *transfer[:3], *(n for pages in lists for n in (len(pages), *pages))]
    return [_MOVES.index(type(transfer)), transfer[0], transfer[1]]


def _transfers(numbers: Iterator[int], num_groups: int) -> Iterator[Transfer]:
    for kind in numbers:
        if kind != _CONDENSE:
            yield _MOVES[kind](next(numbers), next(numbers))
            continue
        slot, position, dropped = islice(numbers, 3)
        lists = [list(islice(numbers, next(numbers))) for _ in range(2 * num_groups)]
        yield Condense(slot, position, dropped, lists[:num_groups], lists[num_groups:])


def _flat(part: Any) -> Int[np.ndarray, " n"]:
    array = np.asarray(part).reshape(-1)
    # Floats travel as their bits.
    return array.view(np.int32) if array.dtype == np.float32 else array.astype(np.int32)
