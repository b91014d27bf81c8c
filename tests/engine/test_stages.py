"""Steps of a model in stages: equal parts of the decodes, none of which waits for another."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.config import CompileConfig, SchedulerConfig
from llmjax.parallel.stages import idle_shares, stage_layers, stage_of

from .scheduler_harness import Harness

SEQS = CompileConfig(token_buckets=(24,), seq_buckets=(12,))
MANY = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=24)


@pytest.mark.parametrize(("stages", "parts"), [(2, [6, 6]), (3, [4, 4, 4]), (4, [3, 3, 3, 3])])
def test_decodes_are_dealt_out_to_as_many_steps_as_there_are_stages(stages, parts):
    h = Harness(MANY, compile_config=SEQS, stages=stages, depth=1, num_blocks=160)
    for _ in range(12):
        h.add([2, 3], max_tokens=40, ignore_eos=True)
    plans = []
    dispatch, h.dispatch = h.dispatch, lambda: plans.append(dispatch()) or plans[-1]
    for _ in range(60):
        h.step()
    plans = [plan for plan in plans if plan is not None]
    late = plans[30 : 30 + 2 * stages]
    assert [len(plan.chunks) for plan in late] == parts * 2
    rows = [{chunk.seq for chunk in plan.chunks} for plan in late]
    for first, second in zip(rows, rows[stages:], strict=False):
        assert first == second
    assert set.union(*rows[:stages]) == set(h.sequences.values())
    h.drain()
    h.check_outputs()


def test_a_long_prompt_goes_through_the_stages_chunk_behind_chunk():
    h = Harness(SchedulerConfig(prefill_chunk_size=8), stages=3, max_model_len=64)
    (seq,) = h.add(list(range(2, 18)) * 3, max_tokens=1)
    for _ in range(3):
        h.dispatch()
    assert seq.in_flight == 3 and seq.num_computed == 24


# Which stage has what


@settings(deadline=None)
@given(st.integers(1, 100), st.floats(0, 20), st.data())
def test_every_layer_is_in_one_stage_and_none_could_have_less_to_do(num_layers, head, data):
    stages = data.draw(st.integers(1, num_layers))
    layers = stage_layers(num_layers, stages, head)
    assert [i for some in layers for i in some] == list(range(num_layers))
    *sizes, last = [len(some) for some in layers]
    assert min(sizes, default=1) >= 1 and last >= 1
    if sizes:
        # Neither could take a layer of the other and have less to do than that one had.
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) + 1 >= last + head or last == 1
        assert last + 1 + head >= max(sizes) or max(sizes) == 1
    for stage, some in enumerate(layers):
        assert {stage_of(f"layers.{i}.attn.q.weight", layers) for i in some} == {stage}
    assert stage_of("embed.weight", layers) == 0
    assert stage_of("norm.weight", layers) == stage_of("head.weight", layers) == stages - 1


def test_who_has_the_head_has_fewer_layers():
    sizes = [len(some) for some in stage_layers(30, 2, head=8.0)]
    assert sizes == [19, 11]
    assert [len(some) for some in stage_layers(80, 4, head=1.2)] == [21, 20, 20, 19]
    assert [len(some) for some in stage_layers(2, 2, head=50.0)] == [1, 1]


# How long they wait


def test_as_many_steps_as_stages_leave_no_stage_idle():
    assert idle_shares([[1.0] * 4] * 100, in_flight=4) == pytest.approx([0] * 4)
    # One at a time: a stage works a quarter of the time.
    alone = idle_shares([[1.0] * 4] * 1000, in_flight=1)
    assert alone == pytest.approx([3 / 4] * 4, abs=1e-2)


def test_what_the_host_takes_is_waited_for_once_a_round():
    """Two steps in flight, of a second in each of two stages; half a second to plan the next."""
    shares = idle_shares([[1.0, 1.0]] * 1000, in_flight=2, turn=0.5)
    assert shares == pytest.approx([0.2, 0.2], abs=1e-2)


def test_stages_wait_for_the_slowest():
    shares = idle_shares([[1.0, 2.0]] * 1000, in_flight=2)
    assert shares == pytest.approx([1 - 1 / 2, 0], abs=1e-2)
