"""The scheduler's rules, one example each; test_scheduler_properties has random loads."""

import pytest

from llmjax.cache.block_pool import BlockPool
from llmjax.cache.layout import KVLayout
from llmjax.cache.manager import KVCache
from llmjax.config import CompileConfig, SchedulerConfig
from llmjax.engine.buckets import Buckets
from llmjax.engine.scheduler import Scheduler
from llmjax.errors import (
    InvalidRequestError,
    QueueFullError,
    QueueTimeoutError,
    RequestTimeoutError,
)
from llmjax.request import FinishReason, Request, SamplingParams, Sequence, Status, TokenLogprobs

from .scheduler_harness import EOS, VOCAB, Harness, alone, forced

LONG = "context_length_exceeded"


def rows(plan):
    """(request id, start, count, samples) of each chunk."""
    return [(c.seq.request.id, c.start, c.count, c.samples) for c in plan.chunks]


def prompt(n):
    return [i % (VOCAB - 2) + 2 for i in range(n)]


def commit_with(h, *tokens):
    """Commits the oldest step with these tokens instead of the device's."""
    plan, _, _ = h.in_flight.popleft()
    return h.scheduler.commit(plan, [[token] for token in tokens])


def tight(num_blocks=8, **config):
    """A sequence of 12 tokens, 3 pages; two such fill 6."""
    config = SchedulerConfig(max_num_seqs=8, forecast_margin=None, **config)
    h = Harness(config, num_blocks=num_blocks)
    return h, h.add(prompt(12), id="a", max_tokens=12, ignore_eos=True)[0]


# A sequence's life


def test_prompt_then_decodes_ahead_of_the_host():
    h = Harness(depth=2)
    (seq,) = h.add(prompt(5), id="a", max_tokens=3, ignore_eos=True)
    assert rows(h.dispatch()) == [("a", 0, 5, True)]
    assert (seq.num_pending, seq.in_flight, seq.num_computed) == (1, 1, 5)
    assert rows(h.dispatch()) == [("a", 5, 1, True)]
    assert (seq.num_pending, seq.in_flight, len(seq.tokens)) == (2, 2, 5)
    h.commit()
    assert rows(h.dispatch()) == [("a", 6, 1, True)]
    assert h.dispatch() is None, "the last of three tokens is pending"
    h.drain()
    h.check_outputs()


def test_a_decode_takes_the_program_of_decodes():
    h = Harness()
    h.add(prompt(5), max_tokens=8, ignore_eos=True)
    h.add(prompt(5), max_tokens=8, ignore_eos=True)
    assert not h.dispatch().bucket.decode_only
    plan = h.dispatch()
    assert plan.bucket.decode_only
    assert plan.bucket.seqs == 2


def test_decodes_come_first_then_prompts_under_way_then_new_ones():
    config = SchedulerConfig(max_num_seqs=8, prefill_chunk_size=8)
    h = Harness(config, compile_config=CompileConfig(token_buckets=(12,)))
    h.add(prompt(3), id="a", max_tokens=9, ignore_eos=True)
    h.dispatch()
    h.add(prompt(12), id="b")
    assert rows(h.dispatch()) == [("a", 3, 1, True), ("b", 0, 8, False)]
    h.add(prompt(9), id="c")
    assert rows(h.dispatch()) == [("a", 4, 1, True), ("b", 8, 4, True), ("c", 0, 4, False)]


def test_a_step_fills_its_bucket_and_padding_is_counted():
    h = Harness(max_model_len=512)
    h.add(prompt(150), id="a", max_tokens=1)
    assert rows(h.dispatch()) == [("a", 0, 128, False)]
    assert (h.scheduler.bucket_tokens, h.scheduler.padded_tokens) == (128, 0)
    plan = h.dispatch()
    assert rows(plan) == [("a", 128, 22, True)]
    assert (plan.bucket.tokens, plan.num_tokens, plan.num_pages) == (32, 22, 38)
    assert (h.scheduler.bucket_tokens, h.scheduler.padded_tokens) == (160, 10)


def test_chunk_limits():
    config = SchedulerConfig(max_num_seqs=4, prefill_chunk_size=16, max_num_batched_tokens=64)
    buckets = CompileConfig(token_buckets=tuple(range(5, 65)))
    h = Harness(config, compile_config=buckets)
    for name in "abc":
        h.add(prompt(40), id=name, max_tokens=4, ignore_eos=True)
    assert rows(h.dispatch()) == [(name, 0, 16, False) for name in "abc"]
    h.add(prompt(1), id="d", max_tokens=9, ignore_eos=True)
    plan = h.dispatch()
    assert rows(plan) == [*[(n, 16, 16, False) for n in "abc"], ("d", 0, 1, True)]
    # Now one decodes: all prompts together get one chunk.
    assert rows(h.dispatch()) == [("d", 1, 1, True), ("a", 32, 8, True), ("b", 32, 8, True)]


def test_without_chunking_a_prompt_goes_whole():
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_chunked_prefill=False,
        prefill_chunk_size=4,
    )
    h = Harness(config, max_model_len=200)
    h.add(prompt(40), id="a", max_tokens=4, ignore_eos=True)
    h.add(prompt(40), id="b", max_tokens=4, ignore_eos=True)
    assert rows(h.dispatch()) == [("a", 0, 40, True)]
    assert rows(h.dispatch()) == [("a", 40, 1, True), ("b", 0, 40, True)]
    with pytest.raises(InvalidRequestError, match="65 tokens, allowed: up to 64"):
        h.add(prompt(65))


def test_without_chunking_a_recomputation_may_outgrow_the_step():
    config = SchedulerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=16,
        enable_chunked_prefill=False,
        forecast_margin=None,
    )
    h = Harness(config, num_blocks=8)
    h.add(prompt(11), id="a", max_tokens=16, ignore_eos=True)
    (young,) = h.add(prompt(12), id="b", max_tokens=16, ignore_eos=True)
    while not young.num_preemptions:
        h.step()
    assert len(young.tokens) == 17
    h.drain()
    h.check_outputs()


def test_no_step_before_a_program_is_ready():
    config = SchedulerConfig(max_num_seqs=4)
    h = Harness(config, compile_config=CompileConfig(seq_buckets=(2, 4)), ready=False)
    for name in "abc":
        h.add(prompt(5), id=name, max_tokens=9, ignore_eos=True)
    assert h.dispatch() is None
    small = next(b for b in h.buckets.all if (b.tokens, b.seqs) == (32, 2))
    h.buckets.mark_ready(small)
    assert [row[0] for row in rows(h.dispatch())] == ["a", "b"]
    assert h.dispatch().bucket == small, "decodes run in it until their own is ready"
    h.all_ready()
    assert [row[0] for row in rows(h.dispatch())] == ["a", "b", "c"]


# Admission


def test_admission_wants_pages_for_the_whole_prompt():
    h, _ = tight()
    h.add(prompt(24), id="b", max_tokens=4)
    h.add(prompt(1), id="c")
    assert rows(h.dispatch()) == [("a", 0, 12, True)], "3 of 8 pages are taken, and b wants 6"
    assert h.scheduler.num_waiting == 2, "and c does not overtake b"
    h.abort("a")
    h.commit()
    assert [row[0] for row in rows(h.dispatch())] == ["b", "c"]


def test_admission_forecasts_what_those_that_run_will_need():
    def started(**params):
        h = Harness(SchedulerConfig(max_num_seqs=8), num_blocks=8)
        h.add(prompt(12), id="a", max_tokens=12, ignore_eos=True)
        h.add(prompt(4), id="b", **params)
        return [row[0] for row in rows(h.dispatch())]

    assert started(max_tokens=9, ignore_eos=True) == ["a"], "6 pages and 4 in the end"
    assert started(max_tokens=4, ignore_eos=True) == ["a", "b"]
    assert started(max_tokens=9) == ["a"], "it hardly ever stops before"


def test_what_comes_first_needs_no_forecast():
    h = Harness(SchedulerConfig(max_num_seqs=8, forecast_margin=100.0), num_blocks=8)
    h.add(prompt(30), id="a", max_tokens=2)
    assert rows(h.dispatch()) == [("a", 0, 30, True)]


def test_no_more_run_than_max_num_seqs():
    h = Harness(SchedulerConfig(max_num_seqs=2))
    for name in "abc":
        h.add(prompt(2), id=name, max_tokens=2, ignore_eos=True)
    assert len(h.dispatch().chunks) == 2
    assert (h.scheduler.num_running, h.scheduler.num_waiting) == (2, 1)
    h.drain()
    h.check_outputs()


def test_a_full_queue_refuses_requests_but_not_further_choices():
    h = Harness(SchedulerConfig(max_num_seqs=1, max_queue_len=2))
    h.add(prompt(2))
    h.add(prompt(2), n=3)
    with pytest.raises(QueueFullError, match="2 requests wait") as error:
        h.add(prompt(2))
    assert error.value.retry_after == 1
    h.wait(7.5)
    with pytest.raises(QueueFullError) as error:
        h.add(prompt(2))
    assert error.value.retry_after == 8
    h.abort("1")
    h.add(prompt(2))


def test_a_full_queue_says_when_to_come_back_by_how_fast_it_moves():
    h = Harness(SchedulerConfig(max_num_seqs=1, max_queue_len=10), depth=1)
    h.add(prompt(2), max_tokens=1)
    h.drain()
    h.wait(3600)  # nobody was waiting: that says nothing
    for _ in range(8):
        while h.scheduler.num_queued < 10:
            h.add(prompt(2), max_tokens=1)
        h.step()
        h.wait(2)
    h.add(prompt(2), max_tokens=1)
    with pytest.raises(QueueFullError) as error:
        h.add(prompt(2))
    assert error.value.retry_after == 20
    h.wait(16)
    with pytest.raises(QueueFullError) as error:
        h.add(prompt(2))
    assert error.value.retry_after == 40


@pytest.mark.parametrize(
    ("size", "params", "message", "param", "code"),
    [
        (0, {}, "empty", "prompt", None),
        (
            10,
            {"max_tokens": 23},
            "10 tokens and 23 are asked .* 33; .* holds 32",
            "max_tokens",
            LONG,
        ),
        (32, {"max_tokens": None}, "32 tokens and at least 1 .* 33; .* holds 32", "prompt", LONG),
        (32, {"max_tokens": 1}, "together 33", "prompt", LONG),
    ],
)
def test_what_can_never_run_is_refused(size, params, message, param, code):
    h = Harness(SchedulerConfig(max_num_seqs=8), num_blocks=8)
    with pytest.raises(InvalidRequestError, match=message) as error:
        h.add(prompt(size), **params)
    assert (error.value.param, error.value.code) == (param, code)
    assert not h.scheduler.has_work


def test_what_just_fits_the_context_runs_in_a_pool_of_that_size():
    h = Harness(SchedulerConfig(max_num_seqs=8), num_blocks=8)
    h.add(prompt(10), max_tokens=22, ignore_eos=True)
    h.add(prompt(31), max_tokens=None, ignore_eos=True)
    h.add(prompt(3), max_tokens=None, ignore_eos=True)
    h.drain()
    h.check_outputs()
    assert [len(tokens) for tokens in h.output.values()] == [22, 1, 29]
    assert set(h.finish.values()) == {FinishReason.LENGTH}


def test_a_pool_smaller_than_the_context_is_refused():
    config = SchedulerConfig(max_num_seqs=2)
    buckets = Buckets(config, CompileConfig(), max_model_len=33, block_size=4)
    cache = KVCache(BlockPool(8), KVLayout(4))
    with pytest.raises(ValueError, match=r"8 pages .* max_model_len \(33\), which takes 9"):
        Scheduler(config, buckets, cache, max_model_len=33)


def test_an_id_may_be_used_again_once_it_is_done():
    h = Harness()
    h.add(prompt(2), id="a")
    with pytest.raises(InvalidRequestError, match="'a' is running already"):
        h.scheduler.add(Sequence(Request("a", prompt(2), SamplingParams()), 0, 0, prompt(2)))
    h.dispatch()
    h.abort("a")
    h.scheduler.add(Sequence(Request("a", prompt(2), SamplingParams()), 0, 0, prompt(2)))
    h.scheduler.check_balance()


# Deadlines


def test_what_has_not_ended_in_time_fails_and_gives_its_pages_back():
    h = Harness(depth=2)
    h.add(prompt(9), id="late", n=2, max_tokens=20, ignore_eos=True, options={"timeout": 3.0})
    h.add(prompt(5), id="b", max_tokens=20, ignore_eos=True)
    h.dispatch(), h.dispatch()
    assert h.wait(2.9) == []
    held = h.cache.num_used
    deltas = h.wait(0.2)
    assert [(d.request_id, d.index, d.finish_reason) for d in deltas] == [
        ("late", 0, FinishReason.ABORT),
        ("late", 1, FinishReason.ABORT),
    ]
    assert all(isinstance(d.error, RequestTimeoutError) for d in deltas)
    assert "had not ended 3.1 s after its arrival, and its timeout is 3 s" in str(deltas[0].error)
    assert h.cache.num_used == held, "steps in flight may still write there"
    h.commit(), h.commit()
    assert h.cache.num_used < held
    h.drain()
    h.check_outputs()


def test_what_has_waited_too_long_is_refused_but_not_what_has_begun():
    h = Harness(SchedulerConfig(max_num_seqs=1, queue_timeout=5.0))
    h.add(prompt(5), id="a", max_tokens=40, ignore_eos=True)
    h.add(prompt(5), id="b", max_tokens=2)
    h.add(prompt(5), id="c", max_tokens=2, options={"queue_timeout": 2.0})
    h.add(prompt(5), id="d", max_tokens=2, options={"queue_timeout": 9.0})
    h.step()
    (delta,) = h.wait(2.5)
    assert (delta.request_id, delta.error.retry_after) == ("c", 3)
    assert isinstance(delta.error, QueueTimeoutError)
    assert "waited 2.5 s in the queue" in str(delta.error)
    assert [d.request_id for d in h.wait(3.0)] == ["b", "d"], "the server's limit holds for all"
    assert h.wait(100.0) == []
    h.drain()
    h.check_outputs()


def test_what_was_preempted_has_begun():
    h, _ = tight()
    h.add(prompt(12), id="b", max_tokens=8, ignore_eos=True, options={"queue_timeout": 1.0})
    while not h.scheduler.num_preemptions:
        h.step()
    assert h.scheduler.num_waiting == 1
    assert h.wait(2.0) == []
    h.drain()
    h.check_outputs()


# Stopping


@pytest.mark.parametrize(
    ("params", "tokens", "finish", "stop_reason"),
    [
        ({}, [5, EOS], FinishReason.STOP, None),
        ({"ignore_eos": True, "max_tokens": 3}, [EOS, EOS, EOS], FinishReason.LENGTH, None),
        ({"stop_token_ids": [9]}, [5, 9], FinishReason.STOP, 9),
        ({"stop_token_ids": [EOS]}, [EOS], FinishReason.STOP, None),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [EOS], FinishReason.STOP, EOS),
        ({"min_tokens": 2}, [EOS, EOS, EOS], FinishReason.STOP, None),
        ({"min_tokens": 1, "stop_token_ids": [9]}, [9, 9], FinishReason.STOP, 9),
        ({"max_tokens": 2}, [5, EOS], FinishReason.STOP, None),
        ({"max_tokens": 2}, [5, 6], FinishReason.LENGTH, None),
        ({"max_tokens": None}, [5, 5, 5, 5], FinishReason.LENGTH, None),  # max_model_len 8
    ],
)
def test_stops(params, tokens, finish, stop_reason):
    h = Harness(max_model_len=8, depth=1)
    (seq,) = h.add(prompt(4), **{"max_tokens": 4, **params})
    for token in tokens:
        assert seq.status is not Status.FINISHED
        h.dispatch()
        (delta,) = commit_with(h, token)
        assert delta.token_ids == [token]
    assert (delta.finish_reason, delta.stop_reason) == (finish, stop_reason)
    assert seq.tokens[4:] == tokens
    assert not h.scheduler.has_work


def test_rows_after_the_end_are_ignored_and_pages_kept_until_then():
    h = Harness(depth=2)
    (seq,) = h.add(prompt(5))
    h.dispatch()
    h.dispatch()
    (delta,) = commit_with(h, EOS)
    assert delta.finish_reason is FinishReason.STOP
    assert (h.pool.num_used, h.scheduler.num_running) == (2, 0)
    assert h.scheduler.has_work
    assert seq.slot >= 0
    assert commit_with(h, 7) == []
    assert (h.pool.num_used, seq.slot, seq.tokens[5:]) == (0, -1, [EOS])
    assert not h.scheduler.has_work


# Page shortage


def test_the_youngest_is_preempted_and_comes_back_first():
    h, old = tight()
    (young,) = h.add(prompt(12), id="b", max_tokens=8, ignore_eos=True)
    h.add(prompt(1), id="c", max_tokens=1)
    h.depth = 1
    while not young.num_preemptions:
        h.step()
    assert h.scheduler.lives.waiting.oldest is young
    assert (young.block_tables, young.slot, young.num_computed) == ([], -1, 0)
    assert len(young.tokens) > 12
    h.drain()
    h.check_outputs()
    assert old.num_preemptions == 0


def test_a_preempted_sequence_in_flight_keeps_its_pages_and_its_token():
    h, _ = tight(num_blocks=6)
    (young,) = h.add(prompt(12), id="b", max_tokens=8, ignore_eos=True)
    assert rows(h.dispatch()) == [("a", 0, 12, True), ("b", 0, 12, True)]
    assert h.dispatch() is None, "the older wants a page, which the younger gives when it is back"
    assert (young.status, young.num_preemptions, young.in_flight) == (Status.WAITING, 1, 1)
    assert len(young.block_tables[0]) == 3
    assert young.slot >= 0
    assert {delta.request_id for delta in h.commit()} == {"a", "b"}
    assert (len(young.tokens), young.block_tables, young.slot) == (13, [], -1)
    assert rows(h.dispatch()) == [("a", 12, 1, True)]
    h.drain()
    h.check_outputs()


def test_a_preempted_sequence_may_end_with_the_step_in_flight():
    h, _ = tight(num_blocks=6)
    h.add(prompt(12), id="b", max_tokens=2)
    h.dispatch()
    assert h.dispatch() is None
    deltas = commit_with(h, 5, EOS)
    assert [d.finish_reason for d in deltas] == [None, FinishReason.STOP]
    assert (h.scheduler.num_waiting, h.pool.num_used) == (0, 3)
    h.scheduler.check_balance()


def test_pages_on_their_way_back_are_waited_for_instead_of_preempting_more():
    h = Harness(SchedulerConfig(max_num_seqs=8, forecast_margin=None), num_blocks=9)
    sequences = [h.add(prompt(12), id=n, max_tokens=8, ignore_eos=True)[0] for n in "abc"]
    h.dispatch()
    assert h.dispatch() is None, "a and b want a page each; c, in flight, has three"
    assert [s.num_preemptions for s in sequences] == [0, 0, 1]
    h.commit()
    assert [row[0] for row in rows(h.dispatch())] == ["a", "b"]
    h.drain()
    h.check_outputs()


def test_pages_on_their_way_back_count_for_one_sequence_only():
    h = Harness(SchedulerConfig(max_num_seqs=8, forecast_margin=None), num_blocks=7)
    sizes = {"a": 12, "b": 12, "c": 2}
    sequences = [h.add(prompt(k), id=n, max_tokens=8, ignore_eos=True)[0] for n, k in sizes.items()]
    h.dispatch()
    assert h.dispatch() is None, "c has one page for a, so that b must go too"
    assert [s.num_preemptions for s in sequences] == [0, 1, 1]
    h.drain()
    h.check_outputs()


def test_a_preempted_sequence_waits_for_its_steps_in_flight():
    h = Harness(SchedulerConfig(max_num_seqs=2, forecast_margin=None), num_blocks=8)
    h.add(prompt(14), id="a", max_tokens=1)
    (seq,) = h.add(prompt(12), id="b", max_tokens=9, ignore_eos=True)
    while not seq.num_preemptions:
        h.dispatch()
    h.commit()
    assert (seq.in_flight, h.pool.num_free) == (4, 4)
    assert h.dispatch() is None, "four pages would do, but the tokens in flight are unknown"
    h.drain()
    h.check_outputs()


def test_prompt_logprobs_are_told_once():
    h, _ = tight(prefill_chunk_size=5)
    (young,) = h.add(prompt(12), id="b", max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    h.drain()
    h.check_outputs()
    assert young.num_preemptions > 0
    assert young.num_prompt_logprobs == len(h.prompt_logprobs["b", 0]) == 11


def test_prompt_logprobs_told_twice_are_an_error():
    h = Harness(SchedulerConfig(max_num_seqs=8, prefill_chunk_size=8))
    h.add(prompt(12), prompt_logprobs=0)
    first, second = h.dispatch(), h.dispatch()
    entries = [TokenLogprobs(token, 0.0, 1, (), ()) for token in prompt(12)[1:]]
    h.scheduler.commit(first, [[]], prompt_logprobs=[entries[:8]])
    with pytest.raises(RuntimeError, match="told twice"):
        h.scheduler.commit(second, [[3]], prompt_logprobs=[entries[7:]])


# Aborts


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("commits", range(3))
def test_an_abort_at_any_moment_leaks_nothing(steps, commits):
    config = SchedulerConfig(max_num_seqs=2, prefill_chunk_size=6)
    h = Harness(config, num_blocks=16, depth=2)
    h.add(prompt(14), id="a", n=2, max_tokens=9, ignore_eos=True)
    h.add(prompt(14), id="b", max_tokens=9, ignore_eos=True)
    for _ in range(steps):
        h.step()
    for _ in range(commits):
        h.dispatch() if len(h.in_flight) < 2 else h.commit()
    deltas = h.abort("a")
    assert [(d.index, d.token_ids, d.finish_reason) for d in deltas] == [
        (0, [], FinishReason.ABORT),
        (1, [], FinishReason.ABORT),
    ]
    assert h.abort("a") == []
    h.drain()
    h.check_outputs()


def test_one_choice_may_be_ended_alone():
    h = Harness()
    h.add(prompt(3), id="a", n=2, max_tokens=9, ignore_eos=True)
    h.step()
    assert [d.index for d in h.abort("a", 1)] == [1]
    h.drain()
    h.check_outputs()
    assert h.finish["a", 0] is FinishReason.LENGTH
    assert h.abort("nobody") == []


# The seam to the runner


def test_logprobs_pass_through():
    h = Harness(depth=1)
    h.add(prompt(3), max_tokens=2, ignore_eos=True)
    h.dispatch()
    plan, (tokens, _), _ = h.in_flight.popleft()
    logprob = TokenLogprobs(tokens[0][0], -0.5, 1, (3,), (-0.5,))
    (delta,) = h.scheduler.commit(plan, tokens, [[logprob]])
    assert delta.logprobs == [logprob]


def test_steps_are_committed_in_order_and_whole():
    h = Harness()
    h.add(prompt(3), max_tokens=4, ignore_eos=True)
    first, second = h.dispatch(), h.dispatch()
    with pytest.raises(RuntimeError, match="out of order"):
        h.scheduler.commit(second, [[3]])
    with pytest.raises(RuntimeError, match="no token for '0'"):
        h.scheduler.commit(first, [[]])


def test_check_balance_sees_a_lost_page():
    h = Harness()
    (seq,) = h.add(prompt(9))
    h.dispatch()
    h.pool.free([seq.block_tables[0][-1]])
    with pytest.raises(RuntimeError, match="free pages"):
        h.scheduler.check_balance()


def test_the_reference_says_what_the_device_says():
    h = Harness(depth=1)
    (seq,) = h.add(prompt(6), max_tokens=5, ignore_eos=True)
    h.drain()
    assert alone(seq, 11) == (seq.tokens[6:], FinishReason.LENGTH)


@pytest.mark.parametrize("crowd", [0, 5])
def test_what_is_forced_takes_no_larger_program_than_it_is_worth(crowd):
    buckets = CompileConfig(token_buckets=(64,), seq_buckets=(8,))
    h = Harness(SchedulerConfig(max_num_seqs=8), compile_config=buckets, depth=1)
    for _ in range(crowd):
        h.add([3], max_tokens=30, ignore_eos=True)
    (seq,) = h.add([3, 4, 6], max_tokens=30, ignore_eos=True, forces=True)
    at_once = one_by_one = 0
    while seq.status is not Status.FINISHED:
        plan = h.dispatch()
        behind = [c for c in plan.chunks if c.seq is seq and c.start >= seq.prompt_len]
        at_once += sum(c.count > 1 for c in behind)
        one_by_one += sum(forced(c) and c.count == 1 for c in behind)
        assert plan.bucket.decode_only or at_once or not behind
        h.commit()
    assert (at_once > 0, one_by_one > 0) == ((True, False) if not crowd else (False, True))
    h.drain()
    h.check_outputs()


def test_what_was_computed_before_a_preemption_does_not_come_back_token_by_token():
    buckets = CompileConfig(token_buckets=(64,), seq_buckets=(8,))
    config = SchedulerConfig(max_num_seqs=8, prefill_chunk_size=8)
    h = Harness(config, compile_config=buckets, num_blocks=96, depth=1)
    for _ in range(7):
        h.add([3], max_tokens=30, ignore_eos=True)
    (seq,) = h.add([3, 4, 6], max_tokens=30, ignore_eos=True)
    while seq.output_len < 10:
        h.step()
    h.scheduler.lives.preempt(seq)
    h.cache.reset()
    counts = []
    while seq.num_computed < len(seq.tokens) - 1:
        counts += [c.count for c in h.dispatch().chunks if c.seq is seq]
        h.commit()
    assert counts == [8, 5]
    h.drain()
    h.check_outputs()
