"""Whole simulations: what comes out, what is left, and how full the pages are."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.config import CacheConfig, SchedulerConfig
from llmjax.errors import ConfigError
from llmjax.simulate import BASELINES, run
from llmjax.simulate.baselines import power_of_two, run_baseline
from llmjax.simulate.device import DEVICES, Machine
from llmjax.simulate.replica import Replica, Setup
from llmjax.simulate.report import Slo, percentiles, report, table
from llmjax.simulate.run import capacity, p99_ttft, simulate
from llmjax.simulate.shapes import SHAPES, ModelShape
from llmjax.simulate.traces import poisson, read_trace

HERE = Path(__file__).parent
SMALL = ModelShape(1000, 64, 4, 4, 2, 16, 128, 512)
# Two layers that see 64 tokens, two that see all.
WINDOWED = ModelShape(1000, 64, 4, 4, 2, 16, 128, 512, windows=(64, None, 64, None))


def setup(shape=SMALL, *, pages=400, cache=None, **scheduler) -> Setup:
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "max_queue_len": None}
    return Setup(
        Machine(shape, DEVICES["l4"]),
        CacheConfig(num_gpu_blocks_override=pages, **(cache or {})),
        SchedulerConfig(**options | scheduler),
    )


def check_conserved(outcome, arrivals) -> None:
    """Every request has all its tokens, in order of time, and one gap for each but the first."""
    assert sorted(r.arrival.index for r in outcome.records) == [a.index for a in arrivals]
    done = [r for r in outcome.records if r.refused is None]
    assert all(r.tokens == r.arrival.output_len for r in done)
    assert all(r.arrival.time < r.first <= r.last for r in done)
    assert len(outcome.gaps) == sum(r.tokens - 1 for r in done)
    assert all(gap >= 0 for gap in outcome.gaps)


@given(
    st.integers(0, 2**16),
    st.sampled_from([SMALL, WINDOWED]),
    st.sampled_from(["fcfs", "priority", "lpm"]),
    st.sampled_from([0.0, 0.001]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_every_request_ends_with_its_tokens_and_pages_come_back(
    seed, shape, policy, swap, caching, chunked
):
    arrivals = poisson(60, 400.0, 120, 60, spread=0.9, seed=seed)
    setting = setup(
        shape,
        pages=100,
        cache={"swap_space": swap, "enable_prefix_caching": caching},
        scheduling_policy=policy,
        enable_chunked_prefill=chunked,
    )
    replica = Replica(setting)
    for arrival in arrivals:
        replica.run(arrival.time)
        replica.submit(arrival)
    replica.run()
    replica.scheduler.check_balance()
    assert replica.cache.num_used == 0
    assert replica.cache.pool.num_used == replica.cache.num_cached
    assert not replica.has_work and replica.load == 0
    check_conserved(simulate(setting, arrivals), arrivals)
    for name in BASELINES:
        check_conserved(run_baseline(name, setting, arrivals), arrivals)


def said(setting, arrivals, **options) -> dict:
    result = report(simulate(setting, arrivals, **options), Slo())
    del result["scheduler_cpu_seconds"]
    return result


def test_a_simulation_is_the_same_again():
    loads = [poisson(80, 300.0, 100, 40, spread=0.5, seed=seed) for seed in (1, 1, 2)]
    one, again, other = (said(setup(pages=120), load) for load in loads)
    assert one == again != other


def test_a_lone_request_takes_the_time_of_its_steps():
    (arrival,) = poisson(1, 1.0, 100, 3, spread=0.0, seed=0)
    setting = setup()
    (record,) = simulate(setting, [arrival]).records
    replica = Replica(setting)
    replica.submit(arrival)
    replica.run()
    seconds = list(replica.timeline.seconds)
    assert record.first == pytest.approx(seconds[0])
    # A step is sent off before the last token is known; nothing waits for it.
    assert record.last == pytest.approx(sum(seconds[:3]))


def test_pages_are_nearly_full_while_requests_wait_for_them():
    arrivals = poisson(600, 2000.0, 200, 100, spread=0.5, seed=5)
    ours = said(setup(pages=800, max_num_seqs=128), arrivals)
    assert ours["page_use"] >= 0.96
    assert ours["waits_for"]["pages"] > 0.5
    assert 0.9 < ours["kv_use"] < ours["page_use"] <= ours["page_use_when_short"]
    assert ours["slo_kept"] is None


def test_page_use_is_nothing_where_seats_are_what_lacks():
    arrivals = poisson(200, 2000.0, 200, 100, spread=0.5, seed=5)
    ours = said(setup(pages=4000, max_num_seqs=8), arrivals)
    assert ours["page_use"] is None
    assert ours["waits_for"]["sequences"] > 0.9


def test_baselines_use_less_memory_and_serve_less():
    arrivals = poisson(400, 2000.0, 160, 120, spread=0.6, seed=6)
    setting = setup(pages=600, max_num_seqs=128)
    ours = report(simulate(setting, arrivals), Slo())
    theirs = {name: report(run_baseline(name, setting, arrivals), Slo()) for name in BASELINES}
    for name, other in theirs.items():
        assert other["kv_use"] < 0.8 * ours["kv_use"], name
        assert other["output_tokens_per_second"] < ours["output_tokens_per_second"], name
    assert theirs["max"]["kv_use"] < theirs["pow2"]["kv_use"]
    assert ours["output_tokens_per_second"] > 2 * theirs["max"]["output_tokens_per_second"]
    assert ours["output_tokens_per_second"] > 2 * theirs["static"]["output_tokens_per_second"]


@pytest.mark.parametrize(("length", "bound"), [(1, 1), (2, 2), (3, 4), (512, 512), (513, 1024)])
def test_power_of_two(length, bound):
    assert power_of_two(length) == bound


def test_equal_blocks_of_a_trace_are_computed_once():
    arrivals = read_trace(HERE / "mooncake.jsonl")
    setting = Setup(
        Machine(SHAPES["llama-3-8b"], DEVICES["h100"]), scheduler=SchedulerConfig(max_num_seqs=16)
    )
    result = said(setting, arrivals)
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for arrival in arrivals:
        ids = arrival.hash_ids
        paths = [ids[: i + 1] for i in range(len(ids))]
        # The last token is always computed.
        hits += min(512 * sum(p in seen for p in paths), arrival.input_len - 1)
        seen.update(paths)
    assert result["counts"]["prefix_queries"] == sum(a.input_len for a in arrivals)
    assert result["counts"]["prefix_hits"] == pytest.approx(hits, abs=16 * len(arrivals))
    off = Setup(setting.machine, CacheConfig(enable_prefix_caching=False), setting.scheduler)
    assert said(off, arrivals)["counts"]["prefix_hits"] == 0


def test_swapping_brings_back_what_recomputing_would_compute_again():
    arrivals = poisson(150, 3000.0, 60, 200, spread=0.5, seed=7)
    machine = Machine(SHAPES["llama-3-8b"], DEVICES["h100"])
    options = SchedulerConfig(max_num_seqs=64, max_queue_len=None, forecast_margin=None)

    def counts(swap_space):
        cache = CacheConfig(num_gpu_blocks_override=513, swap_space=swap_space)
        return said(Setup(machine, cache, options), arrivals)["counts"]

    recompute, swap = counts(0.0), counts(8.0)
    assert recompute["preemptions"] > 0 and swap["preemptions"] > 0
    assert recompute["pages_saved"] == 0 < swap["pages_loaded"] <= swap["pages_saved"]
    assert swap["recomputed_tokens"] < recompute["recomputed_tokens"]


def test_replicas_share_the_load_and_more_of_them_are_faster():
    arrivals = poisson(200, 500.0, 100, 50, spread=0.5, seed=8)
    setting = setup(pages=64, max_num_seqs=8)
    times = []
    for replicas in (1, 2, 4):
        outcome = simulate(setting, arrivals, replicas=replicas, routing="round-robin")
        check_conserved(outcome, arrivals)
        assert len(outcome.timelines) == replicas
        times.append(p99_ttft(outcome))
    assert times[0] > times[1] > times[2]
    balanced = simulate(setting, arrivals, replicas=4)
    assert p99_ttft(balanced) < times[2]


def test_capacity_is_the_least_number_that_keeps_the_limit(monkeypatch):
    arrivals = poisson(200, 500.0, 100, 50, spread=0.5, seed=8)
    setting = setup(pages=64, max_num_seqs=8)
    limit = 0.1
    tried = capacity(setting, arrivals, p99_ttft_s=limit)
    kept = [n for n, outcome in tried.items() if p99_ttft(outcome) <= limit]
    least = min(kept)
    assert least > 2
    assert kept == [n for n in tried if n >= least]
    assert least - 1 in tried
    monkeypatch.setattr(run, "MOST_REPLICAS", 8)
    with pytest.raises(ConfigError, match=r"8 replicas come to .* no number of them"):
        capacity(setting, arrivals, p99_ttft_s=1e-4)


def test_refused_requests_are_counted(monkeypatch):
    arrivals = poisson(50, 5000.0, 100, 50, spread=0.5, seed=9)
    full = simulate(setup(max_queue_len=4, max_num_seqs=2), arrivals)
    result = report(full, Slo())
    assert result["refused"]["queue full"] > 0
    assert p99_ttft(full) == float("inf")
    long = poisson(5, 10.0, 600, 50, spread=0.0, seed=9)
    result = report(simulate(setup(), long), Slo())
    assert result["refused"] == {"too long": 5}
    assert result["ttft_ms"] is None and "too long" not in table([result])
    monkeypatch.setattr(run, "MOST_REPLICAS", 4)
    with pytest.raises(ConfigError, match="1 to 4"):
        simulate(setup(), arrivals, replicas=5)
    with pytest.raises(ConfigError, match="round-robin"):
        simulate(setup(), arrivals, routing="random")


def test_the_slo_counts_requests_that_keep_both():
    arrivals = poisson(100, 300.0, 100, 20, spread=0.5, seed=10)
    outcome = simulate(setup(pages=64), arrivals)
    first = percentiles([r.ttft for r in outcome.records])["p50"] / 1e3
    between = percentiles([r.mean_gap for r in outcome.records])["p50"] / 1e3
    assert report(outcome, Slo(ttft=first))["slo_kept"] == 0.5
    assert report(outcome, Slo(itl=between))["slo_kept"] == 0.5
    both = report(outcome, Slo(ttft=first, itl=between))
    kept = sum(r.ttft <= first and r.mean_gap <= between for r in outcome.records)
    assert both["slo_kept"] == kept / 100
    assert both["goodput_requests_per_second"] == pytest.approx(kept / both["seconds"])
    with pytest.raises(ConfigError, match="slo_ttft_ms is -1"):
        Slo(ttft=-1e-3)
    with pytest.raises(ConfigError, match="slo_itl_ms is nan"):
        Slo(itl=float("nan"))


def test_percentiles_are_by_nearest_rank():
    assert percentiles([0.004, 0.001, 0.003, 0.002]) == {
        "mean": pytest.approx(2.5),
        "p50": 2.0,
        "p90": 4.0,
        "p99": 4.0,
    }
    assert percentiles([]) is None


def test_nothing_of_it_needs_jax():
    code = (
        "import sys, llmjax_serving.cli.simulate, llmjax.simulate.baselines\n"
        "assert not {'jax', 'flax', 'matplotlib'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_setups_can_be_told(tmp_path):
    assert asdict(setup())["machine"]["shape"]["num_layers"] == 4
    with pytest.raises(ConfigError, match="allows 2 to 512"):
        Setup(setup().machine, max_model_len=513).size_memory()


def test_what_is_not_simulated_is_refused():
    with pytest.raises(ConfigError, match="kv_eviction is 'snapkv', allowed in a simulation: none"):
        Setup(setup().machine, CacheConfig(kv_eviction="snapkv")).size_memory()
