"""Requests go where their prefix is, unless there is so much more to do; and accounts close."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.engine.placement import SEQUENCE, Placement
from llmjax.request import FinishReason, Request, SamplingParams, SequenceDelta

SIZE = 4
UNHURRIED = settings(deadline=None)
ROOM = 10**6


class Double:
    """A replica that has cached whole prompts, by their whole pages."""

    def __init__(self, room=ROOM, prompts=()):
        self.room = room
        self.prompts = [list(prompt) for prompt in prompts]

    def cached(self, request):
        tokens, most = request.prompt_token_ids, 0
        for known in self.prompts:
            for end in range(SIZE, len(tokens), SIZE):
                if known[:end] == tokens[:end]:
                    most = max(most, end)
        return most


def request(id, prompt, n=1):
    return Request(str(id), list(prompt), SamplingParams(n=n))


def delta(request, index=0, tokens=(), ends=None):
    return SequenceDelta(request.id, index, list(tokens), [], finish_reason=ends)


def placed(placement, *requests):
    numbers = []
    for r in requests:
        place = placement.choose(r)
        numbers.append(place.replica)
        placement.take(r, place)
    return numbers


def end(placement, *requests):
    for r in requests:
        for index in range(r.params.n):
            placement.follow([delta(r, index, [7]), delta(r, index, ends=FinishReason.STOP)])


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=40)


@UNHURRIED
@given(st.lists(st.lists(prompts, max_size=4), min_size=1, max_size=5), prompts)
def test_of_idle_replicas_it_is_the_one_with_most_of_the_prompt(caches, prompt):
    replicas = [Double(prompts=cache) for cache in caches]
    asked = request(0, prompt)
    chosen = Placement(replicas, block_size=SIZE).choose(asked).replica
    assert replicas[chosen].cached(asked) == max(r.cached(asked) for r in replicas)


@UNHURRIED
@given(st.data())
def test_accounts_are_those_of_what_lives_and_nobody_better_is_passed_by(data):
    """Whatever comes and ends: no other replica has more of a prompt and less to do."""
    replicas = [
        Double(data.draw(st.sampled_from([8, 64, ROOM])))
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    placement = Placement(replicas, block_size=SIZE)
    live: dict[str, tuple[Request, int, set[int], bool]] = {}
    for id in range(data.draw(st.integers(1, 25))):
        if live and data.draw(st.booleans()):
            key = data.draw(st.sampled_from(sorted(live)))
            r, number, left, _ = live[key]
            index = data.draw(st.sampled_from(sorted(left)))
            ends = data.draw(st.booleans())
            placement.follow([delta(r, index, [5], FinishReason.LENGTH if ends else None)])
            left -= {index} if ends else set()
            live[key] = (r, number, left, True)
            if not left:
                del live[key]
                replicas[number].prompts.append(r.prompt_token_ids)
        r = request(id, data.draw(prompts), data.draw(st.integers(1, 3)))
        place = placement.choose(r)
        chosen = place.replica
        for i, other in enumerate(replicas):
            better = (
                other.cached(r)
                >= min(len(r.prompt_token_ids) - 1, _shared(r, live, chosen, replicas)),
                placement.queued[i] <= placement.queued[chosen],
                placement.live[i] < placement.live[chosen],
                other.room >= replicas[chosen].room,
            )
            assert not all(better)
        placement.take(r, place)
        live[r.id] = (r, chosen, set(range(r.params.n)), False)
        counts = [
            sum(len(left) for _, at, left, _ in live.values() if at == i)
            for i, _ in enumerate(replicas)
        ]
        assert placement.live == counts
    for r, _, left, _ in live.values():
        placement.follow([delta(r, index, ends=FinishReason.ABORT) for index in left])
    assert placement.live == placement.queued == [0] * len(replicas)
    assert not placement._placed and not any(placement._blocks)


def _shared(r, live, number, replicas):
    """Tokens of a prompt that a replica has or is about to have."""
    about = Double(
        prompts=[other.prompt_token_ids for other, at, _, _ in live.values() if at == number]
    )
    return max(about.cached(r), replicas[number].cached(r))


@UNHURRIED
@given(st.integers(1, 4), st.integers(0, 60), st.integers(1, 60))
def test_one_prompt_in_a_crowd_spreads_as_far_as_it_pays(count, pages, crowd):
    """Where all begin alike: a replica is never ahead of another by more than the prompt saves."""
    placement = Placement([Double() for _ in range(count)], block_size=SIZE)
    shared = list(range(pages * SIZE))
    for id in range(crowd):
        placed(placement, request(id, [*shared, 1000 + id]))
        busiest = max(range(count), key=placement.live.__getitem__)
        for i in range(count):
            ahead = SEQUENCE * (placement.live[busiest] - placement.live[i] - 1)
            assert ahead + placement.queued[busiest] - placement.queued[i] <= 3 * len(shared) + 3
    if crowd * SEQUENCE > count * (3 * len(shared) + 2 * SEQUENCE):
        assert all(placement.live)


def test_prompts_that_come_together_meet():
    """What waits to be computed counts as there, for as long as its request lives."""
    placement = Placement([Double(), Double()], block_size=SIZE)
    a, b = [1] * 400, [2] * 400
    crowd = [request(i, [*(a if i % 2 else b), i]) for i in range(6)]
    assert placed(placement, *crowd) == [0, 1, 0, 1, 0, 1]
    end(placement, *crowd)
    assert placed(placement, request("x", [*a, 9]), request("y", [*a, 9])) == [0, 0]


def test_choices_of_a_request_stay_together_and_count_each():
    placement = Placement([Double(), Double()], block_size=SIZE)
    many = request("many", [1] * 9, n=5)
    assert placed(placement, many, request("one", [2] * 9), request("two", [3] * 9)) == [0, 1, 1]
    assert placement.live == [5, 2]
    placement.follow([delta(many, i, ends=FinishReason.STOP) for i in range(4)])
    assert placement.live == [1, 2] and placement.choose(request("three", [4])).replica == 0


def test_a_replica_without_room_is_avoided():
    full, empty = Double(room=0, prompts=[[1] * 80]), Double()
    placement = Placement([full, empty], block_size=SIZE)
    assert placement.choose(request(0, [1] * 100)).replica == 0, "80 of 100 tokens are there"
    assert placement.choose(request(1, [1] * 20 + [2] * 80)).replica == 1


@pytest.mark.parametrize("salt", [True, False])
def test_only_what_may_be_shared_counts(salt):
    placement = Placement([Double(), Double()], block_size=SIZE, reuse=salt)
    first, second = request(0, [1] * 400), request(1, [1] * 400)
    second.kv_key = "another salt" if salt else None
    assert placed(placement, first, second) == [0, 1]


def test_equal_replicas_take_turns():
    placement = Placement([Double(), Double(), Double()], block_size=SIZE)
    numbers = []
    for id in range(6):
        r = request(id, [id] * 30)
        numbers += placed(placement, r)
        end(placement, r)
    assert numbers == [0, 1, 2, 0, 1, 2]
