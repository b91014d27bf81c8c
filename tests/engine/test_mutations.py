"""The properties notice what they are there for: a fault of the accounts never goes unseen."""

import random

import pytest

from llmjax.cache.evictor import Evictor
from llmjax.cache.host_pool import MoveCosts
from llmjax.cache.layout import KVLayout
from llmjax.cache.manager import KVCache
from llmjax.cache.page_store import Condense, Copy, PageStore

from .scheduler_harness import VOCAB
from .test_scheduler_properties import EVICTIONS, small_harness

SHARED = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
FREE = MoveCosts(0, 0, 1)


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


def now_and_then(method, instead, every=7):
    """`method`, but each seventh call is another's."""
    calls = iter(range(10**9))

    def mutated(*args):
        return (method if next(calls) % every else instead)(*args)

    return mutated


def forget_copies(transfers):
    return [t for t in transfers if not isinstance(t, Copy)]


def skip(*args):
    return None


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


FORGETFUL = {
    "what is kept is not moved": (
        KVCache,
        "take_transfers",
        lambda self: [t for t in TAKE(self) if not isinstance(t, Condense)],
    ),
    "what is kept is not given back": (
        Evictor,
        "carry_out",
        lambda self, seq, *args: CARRY_OUT(self, seq, *args) or seq.kept_pages.clear(),
    ),
    "a chunk goes on as tokens leave": (KVLayout, "run_end", lambda self, start, count: count),
}
CARRY_OUT = Evictor.carry_out
TAKE = KVCache.take_transfers
MUTATIONS = {
    "a reference is not given back": (PageStore, "drop", now_and_then(PageStore.drop, skip)),
    "a reference is not taken": (PageStore, "hold", now_and_then(PageStore.hold, skip)),
    "a copy is left out": (KVCache, "take_transfers", lambda self: forget_copies(TAKE(self))),
    "moves are left out": (KVCache, "take_transfers", lambda self: TAKE(self) and []),
    "nobody waits": (KVCache, "advance", lambda self, seq: mark_all(self, seq)),
    "a window is dropped too soon": (
        KVCache,
        "_drop_before",
        lambda self, seq, way, group, first: DROP_BEFORE(self, seq, way, group, first + 2),
    ),
}
ADVANCE, DROP_BEFORE = KVCache.advance, KVCache._drop_before


def mark_all(cache, seq):
    """Takes all of a prompt for computed with its first chunk."""
    for node in cache.ways[seq].path:
        node.owner = None
    ADVANCE(cache, seq)


def test_without_a_fault_all_is_well():
    done = list(loads())
    assert sum(h.scheduler.num_preemptions for h in done) > 20
    assert sum(h.cache.stats.copied for h in done) > 20
    assert sum(h.host.num_loaded for h in done) > 20


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_seen(monkeypatch, name):
    owner, method, mutated = MUTATIONS[name]
    monkeypatch.setattr(owner, method, mutated)
    with pytest.raises((AssertionError, RuntimeError, KeyError, ValueError, TypeError)):
        list(loads())


def test_without_a_fault_long_ones_forget_in_peace():
    done = list(forgetful_loads())
    assert sum(h.scheduler.num_preemptions for h in done) > 5
    assert sum(h.device.num_evictions for h in done) > 100


@pytest.mark.parametrize("name", FORGETFUL)
def test_a_fault_of_what_is_forgotten_is_seen(monkeypatch, name):
    owner, method, mutated = FORGETFUL[name]
    monkeypatch.setattr(owner, method, mutated)
    with pytest.raises((AssertionError, RuntimeError, KeyError, ValueError, TypeError, IndexError)):
        list(forgetful_loads())
