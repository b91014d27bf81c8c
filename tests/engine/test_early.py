"""What there is no room for begins early: it is computed as far as others do not need the pages."""

import time

import pytest

from llmjax import LLM, SamplingParams
from llmjax.cache.layout import KVLayout
from llmjax.config import SchedulerConfig
from llmjax.errors import QueueTimeoutError
from llmjax.request import Request, RequestOptions, Status

from .scheduler_harness import Harness


def crowded(num_blocks=16, caching=True, windows=(None,), new=None, old=None, **config):
    """One of 32 tokens that ends at 44, and one of 30 behind it, in a pool of 64."""
    settings = {"max_num_seqs": 8, "prefill_chunk_size": 32, "forecast_margin": None} | config
    h = Harness(
        SchedulerConfig(**settings),
        num_blocks=num_blocks,
        depth=1,
        caching=caching,
        windows=windows,
        max_model_len=64 if len(windows) == 1 else 48,
    )
    (first,) = h.add([2] * 31 + [3], id="old", max_tokens=12, ignore_eos=True, options=old)
    h.step()
    (second,) = h.add([4] * 29 + [5], id="new", max_tokens=2, ignore_eos=True, options=new)
    return h, first, second


def is_early(h, seq):
    return h.scheduler.lives.admission.early is seq and seq.status is Status.RUNNING


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("margin", [0.0, 1.5])
def test_it_is_computed_while_it_waits_for_room(caching, margin):
    h, old, new = crowded(caching=caching, forecast_margin=margin)
    while old.status is Status.RUNNING:
        h.step()
    assert new.num_computed and not new.num_computed % 4, "whole pages of it"
    assert new.output_len == 0, "and nothing said"
    begun = new.num_computed
    [chunk] = h.dispatch().chunks
    assert (chunk.seq, chunk.start, chunk.count) == (new, begun, 30 - begun)
    h.commit()
    h.drain()
    h.check_outputs()


def test_it_leaves_a_page_to_each_that_runs():
    h, _, new = crowded()
    h.step()
    assert (new.num_computed, h.cache.num_available) == (24, 1)


def test_it_leaves_a_page_of_each_group():
    h, _, new = crowded(num_blocks=32, windows=(None, 40))
    h.step()
    assert is_early(h, new)
    assert h.cache.num_available >= 2


def test_it_makes_way_first_and_keeps_what_there_is_still_room_for():
    h, old, new = crowded()
    while not new.num_preemptions:
        h.step()
    assert (old.num_preemptions, old.status, new.status) == (0, Status.RUNNING, Status.WAITING)
    assert h.cache.match(new).num_tokens == 20, "but for the page that old took"
    h.drain()
    h.check_outputs()


def test_nobody_behind_it_overtakes_it():
    h, _, new = crowded()
    h.step()
    (small,) = h.add([6, 7], id="small", max_tokens=1)
    assert is_early(h, new)
    while is_early(h, new):
        h.step()
        assert small.status is Status.WAITING or not is_early(h, new)
    h.drain()
    h.check_outputs()


def test_who_ranks_before_it_does_not_wait_for_it():
    h, _, new = crowded(scheduling_policy="priority", new={"priority": 5}, forecast_margin=1.5)
    h.step()
    assert is_early(h, new)
    (urgent,) = h.add([6, 7], id="urgent", max_tokens=1, options={"priority": 0})
    h.step()
    assert urgent.output_len == 1
    h.drain()
    h.check_outputs()


@pytest.mark.parametrize("num_blocks", [12, 16])
def test_who_ranks_behind_it_makes_way_for_it(num_blocks):
    """The old one is of a lower priority, whether it runs into a page or not."""
    h, old, new = crowded(
        num_blocks=num_blocks,
        scheduling_policy="priority",
        old={"priority": 5},
        new={"priority": 3},
    )
    while new.status is not Status.FINISHED:
        h.step()
    assert old.num_preemptions and not new.num_preemptions
    h.drain()
    h.check_outputs()


def test_one_that_ran_before_does_not_wait_for_it():
    """It was preempted for want of memory, and would find none while another is held early."""
    h, old, new = crowded()
    h.step()
    assert is_early(h, new)
    h.scheduler.lives.preempt(old)
    while old.status is not Status.FINISHED:
        h.step()
        assert new.output_len == 0
    h.drain()
    h.check_outputs()


def test_it_goes_on_by_less_than_what_was_worth_beginning():
    h, old, new = crowded(mixed_prefill_tokens=3)
    counts = []
    while len(counts) < 4 and old.status is Status.RUNNING:
        plan = h.dispatch()
        counts += [chunk.count for chunk in plan.chunks if chunk.seq is new]
        h.commit()
    assert counts == [3, 3, 3, 3]


def test_a_smaller_piece_than_a_quarter_of_a_chunk_is_not_begun():
    begun = []
    for chunk in (8, 64):
        h, _, new = crowded(num_blocks=12, prefill_chunk_size=chunk, max_num_batched_tokens=64)
        for _ in range(4):
            h.step()
        begun.append(is_early(h, new))
    assert begun == [True, False]


def test_prompts_that_go_whole_do_not_begin_early():
    begun = []
    for chunked in (True, False):
        h, _, new = crowded(enable_chunked_prefill=chunked, max_num_batched_tokens=64)
        h.step()
        begun.append(is_early(h, new))
        h.drain()
        h.check_outputs()
    assert begun == [True, False]


def test_of_a_window_it_lacks_what_it_was_to_begin_with():
    """All layers see a window: pages for it are counted when it is to be admitted."""
    h, _, new = crowded(num_blocks=14, windows=(36,))
    h.step()
    assert is_early(h, new)
    assert h.cache.missing(new) == 4 > h.cache.num_available
    h.step()
    assert is_early(h, new)
    h.drain()
    h.check_outputs()


def test_one_that_is_aborted_gives_its_pages_back_and_the_next_begins():
    h, _, new = crowded()
    h.step()
    assert is_early(h, new)
    h.abort("new")
    (small,) = h.add([6, 7], id="small", max_tokens=1)
    h.step()
    assert small.status is not Status.WAITING
    h.drain()
    h.check_outputs()


def test_it_still_waits_for_its_turn():
    h, old, new = crowded(new={"queue_timeout": 5.0})
    h.step()
    assert is_early(h, new)
    [delta] = h.wait(6.0)
    assert isinstance(delta.error, QueueTimeoutError)
    assert (new.status, old.status) == (Status.FINISHED, Status.RUNNING)
    h.drain()
    h.scheduler.check_balance()


def test_what_is_on_its_way_is_given_up_where_the_device_has_failed():
    h, _, new = crowded()
    h.step()
    assert is_early(h, new)
    h.fail()
    assert h.scheduler.lives.admission.early is None
    h.drain()
    h.scheduler.check_balance()


@pytest.mark.parametrize("margin", [0.5, 1.5])
@pytest.mark.parametrize("kin", ["choices", "a shared beginning"])
def test_it_does_not_begin_before_those_that_it_passes_by(kin, margin):
    """They wait for a beginning that another computes, and it would keep them waiting."""
    h = Harness(
        SchedulerConfig(max_num_seqs=8, prefill_chunk_size=8, forecast_margin=margin),
        num_blocks=24,
        depth=1,
        max_model_len=80,
    )
    n = 3 if kin == "choices" else 1
    first, *others = h.add([2] * 31 + [3], id="first", n=n, max_tokens=20, ignore_eos=True)
    h.step()
    if not others:
        others = h.add([2] * 31 + [6], id="kin", max_tokens=2, ignore_eos=True)
    (big,) = h.add([4] * 62 + [5], id="big", max_tokens=4, ignore_eos=True)
    for _ in range(7):
        h.step()
    assert first.output_len and all(seq.output_len for seq in others)
    assert not big.output_len
    h.drain()
    h.check_outputs()


def test_alone_it_goes_on_in_small_pieces():
    """In a pool of just what one sequence takes at most, part of which it holds for a window."""
    windows, chunk = (8,), 128
    pages = KVLayout(4, windows).most_pages(400, chunk)
    h = Harness(
        SchedulerConfig(
            max_num_seqs=8,
            prefill_chunk_size=chunk,
            max_num_batched_tokens=512,
            forecast_margin=None,
        ),
        num_blocks=pages,
        depth=1,
        caching=False,
        windows=windows,
        max_model_len=400,
    )
    h.add([2] * 84 + [3], id="old", max_tokens=5, ignore_eos=True)
    h.step()
    (new,) = h.add([4] * 393 + [5], id="new", max_tokens=2, ignore_eos=True)
    h.drain()
    assert new.status is Status.FINISHED
    h.check_outputs()


def test_who_is_cut_off_before_its_turn_never_began(tiny_model):
    """Nothing is charged for it, and its time in the queue goes on."""
    sizes = {"block_size": 4, "max_num_seqs": 8, "token_buckets": (32,), "seq_buckets": (8,)}
    sizes |= {"prefill_chunk_size": 16, "max_model_len": 128, "num_gpu_blocks_override": 32}
    with LLM(str(tiny_model), background=False, **sizes) as llm:

        def ask(name, length, output, **options):
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            request = Request(name, [len(name)] * length, params, frozenset())
            request.options = RequestOptions(**options)
            request.arrival_time = time.monotonic()
            llm.engine.add(request)
            return request

        old = ask("old", 60, 60)
        for _ in range(4):
            llm.engine.step()
        new = ask("newer", 100, 4, queue_timeout=0.5)
        admission, was_early, error = llm.engine.scheduler.lives.admission, False, None
        while error is None:
            for delta in llm.engine.step():
                error = error or delta.error
            was_early |= admission.early is not None
            time.sleep(0.03)
        assert was_early and isinstance(error, QueueTimeoutError)
        assert old.began and not new.began
        llm.engine.abort("old")
        while llm.engine.has_work:
            llm.engine.step()
