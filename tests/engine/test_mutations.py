"""The properties notice what they are there for: a fault of the accounts never goes unseen."""

import random
from functools import partial
from itertools import count

import pytest

from llmjax.cache.evictor import Evictor
from llmjax.cache.host_pool import MoveCosts
from llmjax.cache.layout import KVLayout
from llmjax.cache.manager import KVCache
from llmjax.cache.page_store import Condense, Copy, Load, PageStore, Save
from llmjax.engine.admission import Admission
from llmjax.engine.lives import Lives
from llmjax.engine.room import Room
from llmjax.engine.scheduler import Scheduler

from .scheduler_harness import VOCAB
from .test_scheduler_properties import EVICTIONS, small_harness

SHARED = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
FREE = MoveCosts(0, 0, 1)
SEEN = (AssertionError, RuntimeError)
"""The harness's word, or the accounts'; what else is raised would be a fault of the mutation."""


def loads():
    """Crowds in tiny pools that share, branch, are preempted and moved."""
    for seed in range(40):
        rng = random.Random(seed)
        windows = rng.choice([(None,), (None, 6)])
        h = small_harness(
            *(2, True, rng.choice([3, 8]), 12 * len(windows), 0.0, 0.5, True),
            windows=windows,
            caching=True,
            host_slots=(30, 20),
            costs=FREE,
        )
        for _ in range(12):
            prompt = SHARED[: rng.randint(0, 11)] + [rng.randrange(VOCAB) for _ in range(4)]
            h.add(prompt, n=rng.choice([1, 2]), max_tokens=rng.randint(1, 14))
            for _ in range(rng.randint(0, 3)):
                h.step()
        h.drain()
        h.check_outputs()
        yield h


def once(method, at=20):
    """`method`, but one of its calls does nothing."""
    calls = count()
    return lambda *args: method(*args) if next(calls) != at else None


def without_one(kind, take_transfers, at=5):
    """One transfer of a kind never reaches the device."""
    found = count()

    def mutated(cache):
        transfers = take_transfers(cache)
        return [t for t in transfers if not isinstance(t, kind) or next(found) != at]

    return mutated


def without_saves(take_transfers):
    return lambda cache: [t for t in take_transfers(cache) if not isinstance(t, Save)]


def mark_all(advance):
    """Takes all of a prompt for computed with its first chunk."""

    def mutated(cache, seq):
        for node in cache.ways[seq].path:
            node.owner = None
        advance(cache, seq)

    return mutated


def drop_more(drop_before):
    return lambda cache, seq, way, group, first: drop_before(cache, seq, way, group, first + 2)


def hastily(let_go):
    """Does not wait for the steps in flight."""

    def mutated(lives, seq):
        flying, seq.in_flight = seq.in_flight, 0
        let_go(lives, seq)
        seq.in_flight = flying

    return mutated


def first_of_all(victim):
    return lambda room, seq: min(room._lives.running, key=room._lives.waiting.rank)


def at_nobodys_cost(extend):
    return lambda room, seq, start, count: room._cache.extend(seq, start, start + count)


def leave_one_out(decode_chunks):
    """One decode of several does not go on."""

    def mutated(scheduler):
        chunks, *rest = decode_chunks(scheduler)
        return chunks[:-1] if len(chunks) > 1 else chunks, *rest

    return mutated


def to_its_end(end_of):
    return lambda admission, seq: seq.num_tokens


def lose_a_token(preempt):
    def mutated(lives, seq):
        preempt(lives, seq)
        if seq.output_len:
            seq.tokens.pop()

    return mutated


def forgetful_loads():
    """Crowds that get longer than what they keep."""
    for seed in range(20):
        rng = random.Random(seed)
        eviction = rng.choice(EVICTIONS)
        h = small_harness(2, True, 5, 16, 0.0, 0.5, True, caching=True, eviction=eviction)
        for _ in range(6):
            prompt = SHARED + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
            h.add(prompt, max_tokens=rng.randint(8, 24), ignore_eos=True)
            for _ in range(rng.randint(0, 8)):
                h.step()
        h.drain()
        h.check_outputs()
        yield h


def not_kept(carry_out):
    def mutated(evictor, seq, *args):
        carry_out(evictor, seq, *args)
        seq.kept_pages.clear()

    return mutated


FORGETFUL = {
    "what is kept is not moved once": (KVCache, "take_transfers", partial(without_one, Condense)),
    "what is kept is lost": (Evictor, "carry_out", not_kept),
    "a chunk goes on as tokens leave": (KVLayout, "run_end", lambda _: lambda *at: at[-1]),
}
MUTATIONS = {
    "one reference is not given back": (PageStore, "drop", once),
    "one reference is not taken": (PageStore, "hold", once),
    "one copy is left out": (KVCache, "take_transfers", partial(without_one, Copy)),
    "pages are not saved": (KVCache, "take_transfers", without_saves),
    "one page is not loaded": (KVCache, "take_transfers", partial(without_one, Load)),
    "nobody waits": (KVCache, "advance", mark_all),
    "a window is dropped too soon": (KVCache, "_drop_before", drop_more),
    "pages go back while a step may write there": (Lives, "let_go", hastily),
    "the first in rank makes room": (Room, "_victim", first_of_all),
    "nobody makes room": (Room, "extend", at_nobodys_cost),
    "a decode is passed over": (Scheduler, "_decode_chunks", leave_one_out),
    "what began early is computed to its end": (Admission, "end_of", to_its_end),
    "who is preempted loses a token": (Lives, "preempt", lose_a_token),
}
"""Owner, method, and what makes another method of it."""


def test_without_a_fault_all_is_well():
    done = list(loads())
    assert sum(h.scheduler.num_preemptions for h in done) > 20
    assert sum(h.cache.stats.copied for h in done) > 20
    assert sum(h.host.num_loaded for h in done) > 20


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_seen(monkeypatch, name):
    owner, method, mutate = MUTATIONS[name]
    monkeypatch.setattr(owner, method, mutate(getattr(owner, method)))
    with pytest.raises(SEEN):
        list(loads())


def test_without_a_fault_long_ones_forget_in_peace():
    done = list(forgetful_loads())
    assert sum(h.scheduler.num_preemptions for h in done) > 5
    assert sum(h.device.num_evictions for h in done) > 100


@pytest.mark.parametrize("name", FORGETFUL)
def test_a_fault_of_what_is_forgotten_is_seen(monkeypatch, name):
    owner, method, mutate = FORGETFUL[name]
    monkeypatch.setattr(owner, method, mutate(getattr(owner, method)))
    with pytest.raises(SEEN):
        list(forgetful_loads())
