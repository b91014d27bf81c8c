"""What there is no room for begins early: it is computed as far as others do not need the pages."""

import pytest

from llmjax.config import SchedulerConfig
from llmjax.request import Status

from .scheduler_harness import Harness


def crowded(num_blocks=16, caching=True, **config):
    """One of 32 tokens that ends at 44, and one of 30 behind it, in a pool of 64."""
    settings = {"max_num_seqs": 8, "prefill_chunk_size": 32, "forecast_margin": None} | config
    h = Harness(SchedulerConfig(**settings), num_blocks=num_blocks, depth=1, caching=caching)
    (old,) = h.add([2] * 31 + [3], id="old", max_tokens=12, ignore_eos=True)
    h.step()
    (new,) = h.add([4] * 29 + [5], id="new", max_tokens=2, ignore_eos=True)
    return h, old, new


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


def test_it_makes_way_first_and_keeps_what_there_is_still_room_for():
    h, old, new = crowded()
    while not new.num_preemptions:
        h.step()
    assert (old.num_preemptions, old.status, new.status) == (0, Status.RUNNING, Status.WAITING)
    assert h.cache.match(new).num_tokens == 20, "but for the page that old took"
    h.drain()
    h.check_outputs()


def test_nobody_overtakes_it():
    h, _, new = crowded()
    h.step()
    (small,) = h.add([6, 7], id="small", max_tokens=1)
    while new.status is Status.RUNNING and not new.output_len:
        h.step()
        assert small.status is Status.WAITING
    h.drain()
    h.check_outputs()


def test_a_smaller_piece_than_a_quarter_of_a_chunk_is_not_begun():
    h, _, new = crowded(num_blocks=11, prefill_chunk_size=64)
    h.step()
    assert (new.status, h.cache.num_available) == (Status.WAITING, 2)


def test_prompts_that_go_whole_do_not_begin_early():
    h, old, new = crowded(enable_chunked_prefill=False, max_num_batched_tokens=64)
    while old.status is Status.RUNNING:
        assert new.status is Status.WAITING
        h.step()
    h.drain()
    h.check_outputs()


def test_one_that_is_aborted_gives_its_pages_back_and_the_next_begins():
    h, _, new = crowded()
    h.step()
    assert new.status is Status.RUNNING
    h.abort("new")
    (small,) = h.add([6, 7], id="small", max_tokens=1)
    h.step()
    assert small.status is not Status.WAITING
    h.drain()
    h.check_outputs()
