"""Random loads: whatever happens around a sequence, it says what it says alone."""

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from llmjax.cache.eviction import Eviction
from llmjax.cache.host_pool import MoveCosts
from llmjax.cache.layout import KVLayout
from llmjax.config import CompileConfig, SchedulerConfig
from llmjax.errors import InvalidRequestError

from .scheduler_harness import RANDOM_LOADS, STOP, VOCAB, Harness

SMALL = CompileConfig(token_buckets=(6, 12, 32), seq_buckets=(2, 4), page_buckets=(3, 12))

LONGEST = 48


def small_harness(depth, chunked, chunk, num_blocks, margin, paddings, ready, **cache):
    config = SchedulerConfig(
        scheduling_policy=cache.pop("policy", "fcfs"),
        fair_users=cache.pop("fair", False),
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_paddings=paddings,
        enable_chunked_prefill=chunked,
        prefill_chunk_size=chunk,
        mixed_prefill_tokens=cache.pop("mixed", None),
        queue_timeout=cache.pop("queue_timeout", None),
        forecast_margin=margin,
        num_scheduler_steps=cache.pop("steps", 1),
    )
    return Harness(
        config,
        compile_config=SMALL,
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=LONGEST,
        depth=depth,
        ready=ready,
        **cache,
    )


EVICTIONS = [
    Eviction("streaming", budget=20, quantum=4, kept=4),
    Eviction("streaming", budget=24, quantum=8, kept=4),
    Eviction("snapkv", budget=20, quantum=4, kept=12),
    Eviction("snapkv", budget=24, quantum=8, kept=8),
]
"""Of pages of 4 tokens; what stays is no less than any window here."""


class Loads(RuleBasedStateMachine):
    @initialize(
        depth=st.integers(1, 3),
        stages_and_steps=st.sampled_from([(1, 1), (1, 2), (1, 5), (1, 16), (2, 1), (3, 1)]),
        chunked=st.booleans(),
        chunk=st.sampled_from([1, 3, 8, 64]),
        num_blocks=st.sampled_from([None, 8, 12, 40]),
        margin=st.sampled_from([None, 0.0, 1.5]),
        paddings=st.sampled_from([0.0, 0.1, 0.5]),
        policy=st.sampled_from(["fcfs", "priority", "lpm"]),
        fair=st.booleans(),
        mixed=st.sampled_from([None, None, 2, 8]),
        queue_timeout=st.sampled_from([None, None, 2.0]),
        windows=st.sampled_from([(None,), (None,), (None, 6), (9,), (None, 5, 13)]),
        caching=st.booleans(),
        host_slots=st.sampled_from([(0, 0), (3, 0), (40, 8)]),
        costs=st.sampled_from([MoveCosts(), MoveCosts(1, 1, 1), MoveCosts(1, 100, 1)]),
        eviction=st.sampled_from([None, None, *EVICTIONS]),
    )
    def start(
        self,
        depth,
        stages_and_steps,
        chunked,
        chunk,
        num_blocks,
        margin,
        paddings,
        windows,
        eviction,
        **options,
    ):
        options["stages"], options["steps"] = stages_and_steps
        if num_blocks is None:  # just what one sequence may take
            num_blocks = KVLayout(4, windows).most_pages(LONGEST, chunk if chunked else LONGEST)
        else:
            num_blocks *= len(windows)
        chunked |= eviction is not None  # prompts are cut where tokens leave
        args = (depth, chunked, chunk, num_blocks, margin, paddings, False)
        self.h = small_harness(*args, windows=windows, eviction=eviction, **options)
        self.prompts = [[2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]

    def beginning(self, data):
        """Nothing, or what an earlier prompt began with."""
        prompt = data.draw(st.sampled_from(self.prompts))
        return prompt[: data.draw(st.integers(0, len(prompt)))]

    @rule(
        data=st.data(),
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        priority=st.integers(0, 2),
        user=st.sampled_from([None, "a", "b", "c"]),
        timeouts=st.tuples(*[st.sampled_from([None, None, None, 1.0, 4.0])] * 2),
        max_tokens=st.one_of(st.none(), st.integers(1, 16)),
        min_tokens=st.integers(0, 4),
        stops=st.booleans(),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from([None, 0]),
        forces=st.booleans(),
    )
    def arrive(
        self,
        data,
        prompt,
        n,
        priority,
        user,
        timeouts,
        max_tokens,
        min_tokens,
        stops,
        ignore_eos,
        logprobs,
        forces,
    ):
        prompt = (self.beginning(data) + prompt)[:40]
        self.prompts.append(prompt)
        try:
            self.h.add(
                prompt,
                options={
                    "priority": priority,
                    "user": user,
                    "timeout": timeouts[0],
                    "queue_timeout": timeouts[1],
                },
                n=n,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens or min_tokens),
                stop_token_ids=[STOP] if stops else None,
                ignore_eos=ignore_eos,
                prompt_logprobs=logprobs,
                forces=forces and self.h.depth < 3,  # there masks would have to hold tokens off
            )
        except InvalidRequestError:
            whole = not self.h.scheduler.config.enable_chunked_prefill
            step = self.h.scheduler.config.max_num_batched_tokens
            too_long = len(prompt) + (max_tokens or 1) > self.h.scheduler.max_model_len
            assert too_long or (whole and len(prompt) > step)

    @precondition(lambda self: len(self.h.in_flight) < self.h.depth)
    @rule()
    def dispatch(self):
        self.h.dispatch()

    @precondition(lambda self: self.h.in_flight)
    @rule()
    def commit(self):
        self.h.commit()

    @rule(steps=st.integers(1, 8))
    def run(self, steps):
        for _ in range(steps):
            self.h.step()

    @precondition(lambda self: self.h.sequences)
    @rule(data=st.data())
    def abort(self, data):
        request_id, index = data.draw(st.sampled_from(sorted(self.h.sequences)))
        self.h.abort(request_id, data.draw(st.sampled_from([None, index])))

    @rule()
    def fail(self):
        self.h.fail()

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds):
        self.h.wait(seconds)

    @rule(data=st.data())
    def compiled(self, data):
        self.h.buckets.mark_ready(data.draw(st.sampled_from(self.h.buckets.all)))

    def teardown(self):
        if hasattr(self, "h"):
            self.h.all_ready()
            self.h.drain()
            self.h.check_outputs()


TestLoads = Loads.TestCase
TestLoads.settings = RANDOM_LOADS


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_in_a_tiny_pool(depth, chunk, seed):
    rng = random.Random(seed)
    h = small_harness(depth, True, chunk, 8, None, 0.1, True)
    for _ in range(60):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        h.add(prompt, max_tokens=rng.randint(1, 12), ignore_eos=rng.random() < 0.7)
        for _ in range(rng.randint(0, 6)):
            h.step()
    h.drain()
    h.check_outputs()
    assert h.scheduler.num_preemptions > 0


def test_what_is_there_is_not_computed_again():
    h = small_harness(2, True, 16, 40, None, 0.1, True, caching=True)
    shared = list(range(2, 18))
    h.add([*shared, 1, 2, 3], max_tokens=1)
    h.drain()
    (second,) = h.add([*shared, 1, 2, 9, 9], max_tokens=1)
    h.drain()
    assert second.num_cached_tokens == 18
    assert h.cache.stats.copied == 1
    h.check_outputs()


def test_a_request_alone_among_others_chunked_or_preempted_says_the_same():
    prompt = list(range(1, 13))
    said = set()
    for num_blocks, chunk, others in [(64, 64, 0), (64, 64, 3), (64, 2, 3), (8, 8, 3)]:
        h = small_harness(2, True, chunk, num_blocks, None, 0.1, True)
        for i in range(others):
            h.add([i + 2] * 5, max_tokens=10, ignore_eos=True)
        (seq,) = h.add(prompt, max_tokens=12, ignore_eos=True)
        h.drain()
        said.add(tuple(seq.tokens))
        assert (seq.num_preemptions > 0) == (num_blocks == 8)
    assert len(said) == 1


def test_behind_windows_reuse_decays_by_pages():
    """As others need room, less and less of a beginning is left, not suddenly nothing."""
    found, prompt = [], [2 + i % 15 for i in range(40)]
    for others in range(24):
        h = small_harness(2, True, 8, 40, None, 0.1, True, windows=(None, 6), caching=True)
        h.add(prompt, max_tokens=1)
        h.drain()
        for i in range(others):
            h.add([18, 19, i % 20, i * 7 % 20], max_tokens=1)
            h.drain()
        (again,) = h.add(prompt, max_tokens=1)
        found.append(h.cache.match(again).num_tokens)
    assert found[0] == 39
    assert sorted(set(found)) == [*range(0, 40, 4), 39]
    assert found == sorted(found, reverse=True)
