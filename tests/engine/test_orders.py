"""What a leader sends is what a follower does."""

from __future__ import annotations

import numpy as np
import pytest

from llmjax.cache.page_store import Condense, Copy, Load, Save
from llmjax.engine.batch import SlotTable
from llmjax.engine.buckets import Bucket
from llmjax.engine.follower import Follower
from llmjax.engine.orders import SampleOrder, ScoreOrder, StepOrder, Stop, decode, digest, encode
from llmjax.engine.plan import Chunk, Plan
from llmjax.errors import GroupError
from llmjax.request import Request, SamplingParams, Sequence

BUCKET = Bucket(16, 4, 8)


def table(notes: bool) -> SlotTable:
    return SlotTable(num_slots=6, max_pages=8, num_groups=2, block_size=4, notes=notes)


def sequence(slot: int, tokens: int, **params: object) -> Sequence:
    ids = list(range(tokens))
    seq = Sequence(Request(str(slot), ids, SamplingParams(**params)), 0, 2**40 + slot, ids)
    seq.slot = slot
    seq.block_tables = [[10 * slot + i for i in range(3)], [100 + slot, 200 + slot]]
    return seq


def plan(*chunks: Chunk) -> Plan:
    return Plan(list(chunks), BUCKET, 0, 0, [], [])


def test_a_follower_packs_the_same_steps():
    leader, follower = table(True), table(False)
    a, b = sequence(1, 7, temperature=0.5), sequence(4, 5, logit_bias={3: -2.5}, top_p=0.3)
    steps = [
        ([a], plan(Chunk(a, 0, 7, True))),
        ([b], plan(Chunk(a, 7, 1, True), Chunk(b, 0, 3, False))),
        ([], plan(Chunk(b, 3, 2, True), Chunk(a, 8, 1, True))),
    ]
    condense = Condense(4, 40, 8, [[7, -1, 9], [2]], [[5], []])
    for admitted, step in steps:
        biases = [(seq.slot, leader.admit(seq)) for seq in admitted]
        biases = [(slot, bias) for slot, bias in biases if bias is not None]
        a.block_tables[0].append(77 + len(a.block_tables[0]))
        order = StepOrder(
            biases,
            [(4, [1, 2, 3])],
            [Copy(1, 2), condense, Save(3, 4), Load(5, 6)],
            BUCKET,
            leader.pack(step),
        )
        found, digests = decode(encode(order, leader, [2**32 - 1, 7]), follower)
        assert digests == [2**32 - 1, 7]
        assert (found.histories, found.transfers) == (order.histories, order.transfers)
        assert found.bucket == BUCKET
        for ours, theirs in zip(found.packed, order.packed, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert [slot for slot, _ in found.biases] == [slot for slot, _ in biases]
        for (_, ours), (_, theirs) in zip(found.biases, biases, strict=True):
            np.testing.assert_array_equal(np.stack(ours), np.stack(theirs))


@pytest.mark.parametrize("order", [ScoreOrder(5, [8, 9]), Stop(""), Stop("no memory: 3 GiB")])
def test_other_orders(order):
    assert decode(encode(order, table(True), []), table(False)) == (order, [])


def test_masks():
    masks = np.array([[1, -(2**31), 0], [7, 0, -1]], np.int32)
    for order in (SampleOrder([0, 3], masks), SampleOrder([], masks[:0])):
        found, _ = decode(encode(order, table(True), []), table(False))
        assert found.rows == order.rows
        np.testing.assert_array_equal(found.masks.reshape(-1, 3), order.masks)


class Double:
    """A group, and an engine whose runner samples the same tokens in each step."""

    index = 1

    def __init__(self, *messages: bytes):
        self.messages, self.slots = list(messages), table(False)
        self.runner = self

    def receive(self) -> bytes:
        return self.messages.pop(0)

    def execute(self, order: StepOrder) -> object:
        return self

    def choose(self, *args: object) -> Double:
        return self

    def settle(self, sampled: Double) -> Double:
        return sampled

    token_ids = np.array([4, 2])


def follow(*told: tuple[object, list[int]]) -> None:
    leader = table(True)
    double = Double(*(encode(order, leader, digests) for order, digests in told))
    Follower(double, double).run()


def step_orders() -> list[object]:
    seq, leader = sequence(0, 3), table(True)
    leader.admit(seq)
    packed = leader.pack(plan(Chunk(seq, 0, 3, True)))
    return [StepOrder([], [], [], BUCKET, packed), SampleOrder([], np.zeros((0, 1), np.int32))]


def test_a_follower_ends_when_it_is_told():
    step, sample = step_orders()
    follow((step, []), (sample, []), (Stop(""), [digest(np.array([4, 2]))]))


def test_other_tokens_end_a_follower():
    step, sample = step_orders()
    with pytest.raises(GroupError, match=r"process 1 has sampled other tokens .* in step 0"):
        follow((step, []), (sample, []), (Stop(""), [digest(np.array([4, 3]))]))


def test_a_failed_leader_ends_a_follower():
    with pytest.raises(GroupError, match="process 0 has failed: no memory"):
        follow((Stop("no memory"), []))
