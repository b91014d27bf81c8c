"""In which order waiting sequences begin: longest prefix first, fair shares, and their bounds."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmjax.config import CompileConfig, SchedulerConfig
from llmjax.engine import fairness, waiting
from llmjax.engine.fairness import QUANTUM, Shares

from .scheduler_harness import VOCAB, Harness

BUCKETS = CompileConfig(token_buckets=(8, 48), seq_buckets=(4,))
SLOW = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def harness(policy="fcfs", *, fair=True, caching=False, num_blocks=64, **config):
    config = SchedulerConfig(
        max_num_seqs=4, scheduling_policy=policy, fair_users=fair, prefill_chunk_size=24, **config
    )
    return Harness(config, compile_config=BUCKETS, num_blocks=num_blocks, caching=caching)


def add(h, user, prompt_len, max_tokens, first=2, **options):
    prompt = [first, *[i % (VOCAB - 2) + 2 for i in range(prompt_len - 1)]]
    options = {"user": user, **options}
    return h.add(prompt, max_tokens=max_tokens, ignore_eos=True, options=options)[0]


def order(h):
    """Ids in the order in which they began."""
    begun = [seq for seq in h.sequences.values() if seq.turn]
    return [seq.request.id for seq in sorted(begun, key=lambda seq: seq.turn)]


# Fair shares


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
@SLOW
@given(data=st.data())
def test_the_first_request_of_a_user_waits_for_the_running_batch_only(policy, data):
    h = harness(policy, num_blocks=data.draw(st.sampled_from([10, 64])))
    sizes = st.tuples(st.integers(1, 24), st.integers(1, 8))
    for prompt_len, max_tokens in data.draw(st.lists(sizes, min_size=5, max_size=20)):
        add(h, "heavy", prompt_len, max_tokens)
    for _ in range(data.draw(st.integers(1, 20))):
        h.step()
    begun = len(order(h))
    light = add(h, "light", *data.draw(sizes))
    h.drain()
    assert light.turn == begun + 1
    h.check_outputs()


def test_a_thousand_queued_requests_do_not_delay_anothers_first():
    h = harness()
    for _ in range(1000):
        add(h, "heavy", 3, 8)
    h.step()
    begun = len(order(h))
    light = [add(h, name, 3, 8) for name in "abc"]
    while not all(seq.turn for seq in light):
        h.step()
    # One of the ring goes between two newcomers, so that newcomers starve nobody either.
    assert [seq.turn - begun for seq in light] == [1, 3, 5]


@SLOW
@given(
    policy=st.sampled_from(["fcfs", "lpm"]),
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=2, max_size=4),
)
def test_users_that_wait_get_the_same_number_of_tokens(policy, sizes):
    h = harness(policy, max_paddings=0.9)
    users = "abcd"[: len(sizes)]
    for user, size in zip(users, sizes, strict=True):
        for i in range(40):
            add(h, user, *size, first=i % VOCAB)
    served = dict.fromkeys(users, 0)
    for _ in range(60):
        h.step()
        live = [seq for seq in h.sequences.values() if not seq.turn]
        if {seq.request.options.user for seq in live} != set(users):
            break
        for user in users:
            begun = [seq for seq in h.sequences.values() if seq.turn]
            own = [s for s in begun if s.request.options.user == user]
            served[user] = sum(s.prompt_len + s.output_len for s in own)
    batch = sum(sorted((p + t for p, t in sizes), reverse=True)[:1]) * h.config.max_num_seqs
    assert max(served.values()) - min(served.values()) <= 2 * QUANTUM + batch


def test_within_a_priority_users_take_turns():
    h = harness("priority")
    for priority in (1, 0):
        for user, count in (("a", 3), ("b", 2)):
            for i in range(count):
                prompt = [2 + i] * 30
                id = f"{user}{priority}{i}"
                options = {"user": user, "priority": priority}
                h.add(prompt, id=id, max_tokens=2, ignore_eos=True, options=options)
    h.drain()
    first, second = order(h)[:5], order(h)[5:]
    assert {i[1] for i in first} == {"0"} and {i[1] for i in second} == {"1"}
    assert [i[0] for i in first] == ["a", "b", "a", "a", "b"], "two fill a visit"


def test_an_account_is_kept_while_anything_of_the_user_lives():
    shares = Shares()
    shares.join("a"), shares.join("a"), shares.join("b")
    assert shares.next(["a", "b"]) == "a"
    shares.begin("a", 1000, ["a", "b"])
    shares.leave("a")
    assert shares.next(["a", "b"]) == "b"
    shares.begin("b", 10, ["a"])
    shares.join("b")
    assert shares.next(["a", "b"]) == "b", "a is in debt"
    shares.charge("b", 2000)
    assert shares.next(["a", "b"]) == "a"
    shares.leave("a"), shares.join("a")
    assert shares.next(["a", "b"]) == "b", "b, new himself, went before the ring just now"
    shares.begin("b", 10, ["a", "b"])
    assert shares.next(["a", "b"]) == "a", "a new account"


def test_what_nobody_else_wants_costs_nothing(monkeypatch):
    monkeypatch.setattr(fairness, "QUANTUM", 1)
    h = harness()
    add(h, "a", 2, 50)
    for _ in range(40):
        h.step()
    for i in range(8):
        add(h, "b" if i % 2 else "a", 20, 3)
    h.drain()
    began = [h.sequences[i, 0].request.options.user for i in order(h)]
    assert began[1:5] == ["b", "a", "b", "a"]


# Longest prefix first


def lpm(**config):
    return harness("lpm", fair=False, caching=True, **config)


def test_the_longest_prefix_goes_first():
    h = lpm()
    h.add(list(range(2, 18)), id="known", max_tokens=1)
    h.drain()
    for i in range(4):
        h.add([19, i], id=f"busy{i}", max_tokens=20, ignore_eos=True)
    h.step()
    h.add([19, 18, 17], id="none", max_tokens=1)
    h.add([*range(2, 7), 19], id="some", max_tokens=1)
    h.add([*range(2, 15), 19], id="most", max_tokens=1)
    h.drain()
    h.check_outputs()
    assert order(h)[-3:] == ["most", "some", "none"]


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_overtaken_for_ever(most, seed, monkeypatch):
    monkeypatch.setattr(waiting, "MOST_OVERTAKEN", most)
    rng = random.Random(seed)
    h = lpm()
    known = list(range(2, 18))
    h.add(known, max_tokens=1)
    h.drain()
    for _ in range(200):
        prompt = [*known[: rng.choice([0, 0, 8, 16])], *[rng.randrange(VOCAB) for _ in range(5)]]
        h.add(prompt, max_tokens=rng.randint(1, 6), ignore_eos=True)
        for _ in range(rng.randint(0, 2)):
            h.step()
    h.drain()
    h.check_outputs()
    sequences = list(h.sequences.values())
    worst = 0
    for i, seq in enumerate(sequences):
        overtaking = sum(later.turn < seq.turn for later in sequences[i + 1 :])
        worst = max(worst, overtaking)
    assert worst == most


@pytest.mark.parametrize("shared", [True, False])
def test_shares_are_those_of_all_engines(shared):
    """A user whose prefix ties him to one of two engines gets as much as one who has both."""
    a, b = harness(), harness()
    if shared:
        a.scheduler.lives.waiting.share([b.scheduler.lives.waiting])
    for _ in range(150):
        add(a, "wide", 20, 4)
        add(b, "wide", 20, 4)
        add(a, "tied", 20, 4)
    for _ in range(200):
        a.step()
        b.step()
    began = [h.sequences[i, 0].request.options.user for h in (a, b) for i in order(h)]
    tied = began.count("tied") / len(began)
    assert tied == pytest.approx(1 / 2 if shared else 1 / 4, abs=0.07)
