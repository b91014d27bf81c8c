"""Random loads before workers that answer, fail, die or keep silent: every request says what it
says alone, and nothing is left over."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from llmjax.cache.brought import wanted_of
from llmjax.cache.host_pool import MoveCosts
from llmjax.config import PrefillConfig, SchedulerConfig
from llmjax.engine.handover import Handover
from llmjax.metrics import Metrics
from llmjax.request import FinishReason
from llmjax.transfer.connector import Cancel, Connector, Failure, Pages, Part, Place

from .scheduler_harness import RANDOM_LOADS, VOCAB, Harness, mix

MOVES_ARE_DEAR = MoveCosts(1, 100, 1)
"""So that only what a worker has computed is loaded."""


class Worker(Connector):
    """Answers when it is told to."""

    def __init__(self, name, on_news, most_tokens):
        super().__init__(name, on_news)
        self.up = True
        self.jobs = {}
        self._most_tokens = most_tokens

    @property
    def is_up(self):
        return self.up

    @property
    def most_tokens(self):
        return self._most_tokens

    def _carry(self, message):
        if self.up and isinstance(message, Cancel):
            self.jobs.pop(message.job_id, None)
        elif self.up:
            self.jobs[message.id] = message
        return self.up

    def answer(self, layout, job_id, *, gone=0):
        """Sends the pages of a job, but for some, and computes them as the device would."""
        job = self.jobs.pop(job_id)
        states = [7]
        for token in job.token_ids:
            states.append(mix(states[-1], token))
        size = layout.block_size
        places = wanted_of(layout, len(job.token_ids), job.start)[gone:]
        blocks = [states[b * size + 1 : (b + 1) * size + 1] for _, b in places]
        parts = [
            Part([Place(*p) for p in places[i : i + 3]], [np.array(blocks[i : i + 3], np.int64)])
            for i in range(0, len(places), 3)
        ]
        self._deliver(Pages(job.id, parts, 0))

    def die(self):
        self.up = False
        self.jobs.clear()
        self._fail_all("it died")

    def close(self):
        self.die()


class Apart:
    """A harness, and workers that its requests go to first."""

    def __init__(self, *, count=2, most_tokens=64, min_tokens=4, timeout=10.0, **options):
        sizes = {"num_blocks": 60, "block_size": 4, "max_model_len": 48, "caching": True}
        sizes |= {"host_slots": (40, 0), "costs": MOVES_ARE_DEAR}
        config = SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=32, prefill_chunk_size=8, forecast_margin=None
        )
        self.h = Harness(config, **{**sizes, **options})
        news = threading.Event()
        self.workers = [Worker(f"w{i}", news.set, most_tokens) for i in range(count)]
        self.handover = Handover(
            self.h.cache,
            self.workers,
            PrefillConfig(prefill_min_tokens=min_tokens, prefill_timeout=timeout),
            Metrics("m"),
            news,
            page_bytes=1,
            clock=lambda: self.h.now,
        )

    @property
    def jobs(self):
        return [(worker, job) for worker in self.workers for job in worker.jobs]

    def add(self, prompt, **options):
        choices = self.h.add(prompt, **options)
        self.handover.consider(choices)
        self.check()
        return choices

    def abort(self, *args):
        self.h.abort(*args)
        self.handover.drop_ended()
        self.check()

    def step(self):
        self.handover.poll()
        self.check()
        return self.h.step()

    def answer_all(self):
        for worker, job in self.jobs:
            worker.answer(self.h.cache.layout, job)

    def check(self):
        self.handover.check_balance()
        self.h.scheduler.check_balance()
        asked = [h for h in self.handover._held.values() if h.worker is not None]
        assert sum(h.num_pages for h in asked) <= self.h.host.num_slots
        assert {id for w in self.workers for id in w._open} <= set(self.handover._held)

    def end(self):
        """Nobody answers any more: what is held comes to be computed here."""
        for _ in range(3):
            while self.step():
                pass
            self.h.wait(self.handover.config.prefill_timeout)
        self.h.drain()
        self.h.check_outputs()
        self.check()
        assert not self.handover.num_held and not self.jobs
        assert not any(worker._open for worker in self.workers)


class Handovers(RuleBasedStateMachine):
    @initialize(
        windows=st.sampled_from([(None,), (None, 6), (9,), (None, 5, 13)]),
        blocks=st.sampled_from([13, 60]),
        slots=st.sampled_from([12, 40]),
        caching=st.booleans(),
        costs=st.sampled_from([MOVES_ARE_DEAR, MoveCosts(0, 0, 1)]),
        min_tokens=st.sampled_from([1, 4, 9]),
        most_tokens=st.sampled_from([12, 64]),
    )
    def start(self, windows, blocks, slots, caching, costs, min_tokens, most_tokens):
        groups = len(windows)
        self.a = Apart(
            windows=windows,
            num_blocks=blocks * groups,
            host_slots=(slots * groups, 0),
            caching=caching,
            costs=costs,
            min_tokens=min_tokens,
            most_tokens=most_tokens,
        )
        self.prompts = [list(range(2, 18))]

    @rule(
        data=st.data(),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=16),
        n=st.sampled_from([1, 1, 2, 3]),
        timeouts=st.tuples(*[st.sampled_from([None, None, 3.0, 20.0])] * 2),
        max_tokens=st.integers(1, 12),
        logprobs=st.sampled_from([None, None, None, 0]),
    )
    def arrive(self, data, tail, n, timeouts, max_tokens, logprobs):
        old = data.draw(st.sampled_from(self.prompts))
        prompt = (old[: data.draw(st.integers(0, len(old)))] + tail)[:30]
        self.prompts.append(prompt)
        self.a.add(
            prompt,
            n=n,
            max_tokens=max_tokens,
            prompt_logprobs=logprobs,
            options={"timeout": timeouts[0], "queue_timeout": timeouts[1]},
        )

    @rule(steps=st.integers(1, 6))
    def run(self, steps):
        for _ in range(steps):
            self.a.step()

    @precondition(lambda self: self.a.jobs)
    @rule(data=st.data(), gone=st.sampled_from([0, 0, 0, 1, 2]))
    def answer(self, data, gone):
        worker, job = data.draw(st.sampled_from(self.a.jobs))
        worker.answer(self.a.h.cache.layout, job, gone=gone)

    @precondition(lambda self: self.a.jobs)
    @rule(data=st.data())
    def fail(self, data):
        worker, job = data.draw(st.sampled_from(self.a.jobs))
        del worker.jobs[job]
        worker._deliver(Failure(job, "no"))

    @rule(number=st.integers(0, 1))
    def die_or_come_back(self, number):
        worker = self.a.workers[number]
        if worker.up:
            worker.die()
        worker.up = not worker.up

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds):
        self.a.h.wait(seconds)

    @precondition(lambda self: self.a.h.sequences)
    @rule(data=st.data())
    def abort(self, data):
        request_id, index = data.draw(st.sampled_from(sorted(self.a.h.sequences)))
        self.a.abort(request_id, data.draw(st.sampled_from([None, index])))

    def teardown(self):
        if hasattr(self, "a"):
            self.a.end()


TestHandovers = Handovers.TestCase
TestHandovers.settings = RANDOM_LOADS

LONG = [*range(2, 19), 3, 5, 7]


@pytest.mark.parametrize("windows", [(None,), (None, 6), (9,)])
def test_only_the_end_of_a_prompt_is_computed_here(windows):
    a = Apart(windows=windows, num_blocks=60 * len(windows), host_slots=(60, 0))
    told = []
    a.h.cache.store.on_decision = told.append
    (seq,) = a.add(LONG, max_tokens=3, ignore_eos=True)
    assert not a.step() and seq.is_held
    a.answer_all()
    a.handover.poll()
    plan = a.h.dispatch()
    assert [(chunk.start, chunk.count) for chunk in plan.chunks] == [(16, 4)]
    a.end()
    assert seq.num_cached_tokens == 0, "the cache had none of it"
    decided = {(d.choice, d.reason) for d in told}
    assert decided == {("load", "a prefill worker has computed it")}
    assert a.h.host.num_saved == 0 < a.h.host.num_brought == a.h.host.num_loaded


def test_what_is_there_is_not_asked_for():
    a = Apart()
    a.add(LONG[:9], max_tokens=1)
    a.end()
    (seq,) = a.add(LONG, max_tokens=3)
    ((_, job),) = [(w, w.jobs[j]) for w, j in a.jobs]
    assert job.start == 2
    a.answer_all()
    a.end()
    assert seq.num_cached_tokens == 8


def test_those_that_are_held_are_passed_by():
    a = Apart()
    held = [a.add([i, *LONG])[0] for i in range(10, 18)]
    (short,) = a.add([1, 2, 3], max_tokens=2, ignore_eos=True)
    while not short.finish_reason:
        assert a.step()
    assert all(seq.is_held for seq in held)
    a.end()


def test_jobs_go_to_the_least_loaded_and_wait_for_room():
    a = Apart(count=2, host_slots=(12, 0))
    for i in range(5):
        a.add([i, *LONG], max_tokens=1)
    assert [len(worker.jobs) for worker in a.workers] == [1, 1], "5 pages each of 12"
    a.workers[0].answer(a.h.cache.layout, next(iter(a.workers[0].jobs)))
    while a.step():
        pass
    assert [len(worker.jobs) for worker in a.workers] == [1, 1]
    a.end()


def test_prompts_that_no_worker_takes_are_computed_here():
    a = Apart(most_tokens=20)
    (seq,) = a.add(LONG)
    assert not seq.is_held
    (seq,) = a.add(LONG[:19])
    assert seq.is_held
    a.end()


def test_when_the_last_worker_dies_nobody_waits():
    a = Apart(count=1, host_slots=(6, 0))
    sequences = [a.add([i, *LONG], max_tokens=1)[0] for i in range(4)]
    assert len(a.jobs) == 1
    a.workers[0].die()
    a.handover.poll()
    assert not any(seq.is_held for seq in sequences)
    a.end()


def test_of_a_row_of_failures_one_is_told(caplog):
    a = Apart(count=1)
    caplog.set_level(logging.WARNING)
    for round in range(2):
        for i in range(3):
            a.add([round, i, *LONG], max_tokens=1)
        a.workers[0]._fail_all("out of order")
        a.workers[0].jobs.clear()
        a.end()
        told = [r for r in caplog.records if "out of order" in r.message]
        assert len(told) == round + 1
        a.add([9, round, *LONG], max_tokens=1)
        a.answer_all()
        a.end()
    assert a.handover.metrics.totals()["prefill_jobs_failed_total"] == 6


def test_a_worker_that_does_not_answer_gets_one_job_at_a_time():
    a = Apart(count=1)
    (first,) = a.add([1, *LONG], max_tokens=1)
    a.h.wait(10)
    a.handover.poll()
    assert not first.is_held
    tried, beside = (a.add([i, *LONG], max_tokens=1)[0] for i in (2, 3))
    assert tried.is_held and not beside.is_held
    a.answer_all()
    a.handover.poll()
    again = [a.add([i, *LONG], max_tokens=1)[0] for i in (4, 5)]
    assert all(seq.is_held for seq in again), "it has answered"
    a.end()


def test_what_comes_too_late_is_put_nowhere():
    a = Apart(count=1)
    (seq,) = a.add(LONG, max_tokens=1)
    jobs = dict(a.workers[0].jobs)
    a.h.wait(10)
    a.handover.poll()
    assert not seq.is_held and not a.workers[0].jobs
    a.workers[0].jobs = jobs
    a.answer_all()
    a.end()
    assert a.h.host.num_brought == 0


def test_a_beginning_that_another_computes_just_now_is_waited_for():
    a = Apart()
    (local,) = a.h.add(LONG[:18], max_tokens=4, ignore_eos=True)  # 8 tokens a step
    (seq,) = a.add(LONG, max_tokens=1)
    a.handover.poll()
    a.h.dispatch()
    a.answer_all()
    a.handover.poll()
    assert seq.is_held, "the local one owns what comes next"
    a.end()
    assert local.finish_reason is FinishReason.LENGTH
    assert a.handover.metrics.totals()["prefill_jobs_failed_total"] == 0
