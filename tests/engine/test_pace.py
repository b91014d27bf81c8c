"""How many prompt tokens go beside decodes: the bound of the time between tokens is kept."""

import random

import pytest

from llmjax.config import CompileConfig, SchedulerConfig
from llmjax.engine.pace import LEAST, Pace, StepTimes

from .scheduler_harness import Harness


def seconds(rng, prompt_tokens, decodes, outliers=0.0):
    """A step of a device that takes 4 ms, half one a prompt token, 0.3 a decode."""
    time = 0.004 + 0.0005 * prompt_tokens + 0.0003 * decodes
    time *= rng.uniform(0.95, 1.05)
    return time * rng.uniform(3, 50) if rng.random() < outliers else time


@pytest.mark.parametrize("outliers", [0.0, 0.15])
def test_step_times_are_found_among_outliers(outliers):
    rng, times = random.Random(0), StepTimes()
    for _ in range(300):
        tokens, decodes = rng.choice([0, 16, 64, 128]), rng.randint(1, 32)
        times.observe(tokens, decodes, seconds(rng, tokens, decodes, outliers))
    base, per_token, per_sequence = times.fit
    assert base == pytest.approx(0.004, rel=0.2)
    assert per_token == pytest.approx(0.0005, rel=0.05)
    assert per_sequence == pytest.approx(0.0003, rel=0.2)


@pytest.mark.parametrize("target", [30, 60, 200])
@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_the_target_is_kept_and_used(target, outliers):
    rng = random.Random(1)
    pace = Pace(SchedulerConfig(target_itl_ms=float(target)))
    assert pace.limit(16) == 512, "nothing is known yet"
    steps = []
    for i in range(400):
        # Prompts come in bursts, and who decodes changes.
        decodes = 8 + 8 * (i // 50 % 3)
        tokens = pace.limit(decodes) if i % 3 else 0
        pace.observe(tokens, decodes, seconds(rng, tokens, decodes, outliers))
        steps.append((tokens, 1000 * seconds(rng, tokens, decodes)))
    late = [time for tokens, time in steps[100:] if tokens]
    assert sum(time > target for time in late) < 0.1 * len(late)
    assert sum(late) / len(late) > 0.8 * target


def test_prompts_go_on_where_the_target_cannot_be_kept():
    rng = random.Random(2)
    pace = Pace(SchedulerConfig(target_itl_ms=1.0))
    for i in range(50):
        tokens = 32 * (i % 2)
        pace.observe(tokens, 8, seconds(rng, tokens, 8))
    assert pace.limit(8) == LEAST


def test_limits_that_are_given():
    assert Pace(SchedulerConfig()).limit(1) == 512
    assert Pace(SchedulerConfig(mixed_prefill_tokens=200)).limit(1) == 200
    config = SchedulerConfig(prefill_chunk_size=64, mixed_prefill_tokens=200)
    assert Pace(config).limit(1) == 64
    pace = Pace(SchedulerConfig(target_itl_ms=1e6, mixed_prefill_tokens=48))
    rng = random.Random(3)
    for i in range(50):
        pace.observe(48 * (i % 2), 8, seconds(rng, 48 * (i % 2), 8))
    assert pace.limit(8) == 48


def test_only_prompts_beside_decodes_are_limited():
    config = SchedulerConfig(max_num_seqs=4, prefill_chunk_size=16, mixed_prefill_tokens=4)
    buckets = CompileConfig(token_buckets=tuple(range(5, 65)))
    h = Harness(config, compile_config=buckets)
    h.add([5] * 20, max_tokens=8, ignore_eos=True)
    assert [chunk.count for chunk in h.dispatch().chunks] == [16]
    assert [chunk.count for chunk in h.dispatch().chunks] == [4]
    h.add([6] * 20, max_tokens=8, ignore_eos=True)
    assert [chunk.count for chunk in h.dispatch().chunks] == [1, 4]
    h.drain()
    h.check_outputs()
