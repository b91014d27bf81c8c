"""The timeline that --trace writes: whole at any time, and true to what ran."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from llmjax import LLM, SamplingParams
from llmjax.engine.trace import TRACKS, NoTrace, Trace, TraceFile
from llmjax.errors import ConfigError

SIZES = {
    "block_size": 4,
    "max_num_seqs": 8,
    "token_buckets": (16, 64),
    "seq_buckets": (8,),
    "prefill_chunk_size": 16,
    "max_model_len": 96,
    "background": False,
}
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ROOT = Path(__file__).parents[2]


def crowd(seed, count=16):
    rng = random.Random(seed)
    start = [rng.randrange(3, 250) for _ in range(16)]
    return [
        start + [rng.randrange(3, 250) for _ in range(rng.randint(4, 50))] for _ in range(count)
    ]


def read(path):
    """Spans of each track, in order, and instant events."""
    events = json.loads(path.read_text())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks, instants = defaultdict(list), []
    for event in events:
        if event["ph"] == "X":
            tracks[names[event["tid"]]].append(event)
        elif event["ph"] == "i":
            instants.append(event)
    for spans in tracks.values():
        spans.sort(key=lambda span: span["ts"])
    return tracks, instants


@pytest.fixture(scope="module")
def cramped(tiny_model, tmp_path_factory):
    """The tracks and instants of an engine with too few pages, its stats, and pages evicted."""
    path = tmp_path_factory.mktemp("trace") / "cramped.json"
    options = {"num_gpu_blocks_override": 30, "swap_space": 0.01, "kv_offloading_size": 0.01}
    options["forecast_margin"] = None  # admits more than there is room for
    with LLM(str(tiny_model), trace=path, **options, **SIZES) as llm:
        for seconds in (1e-9, 10.0):  # moving is cheap, then dear
            costs = llm.engine.host.costs
            costs.save, costs.load, costs.compute = seconds, seconds, 1e-3
            llm.generate(crowd(3), PARAMS, use_tqdm=False)
        stats, evicted = llm.engine.stats(), llm.engine.cache.stats.evicted
        json.loads(path.read_text())  # whole while it is written to
    return *read(path), stats, evicted


def test_spans_of_a_track_do_not_overlap(cramped):
    tracks, _, _, _ = cramped
    assert {*TRACKS} - {"pages"} <= tracks.keys()
    for name, spans in tracks.items():
        for a, b in pairwise(spans):
            assert a["ts"] + a["dur"] <= b["ts"] + 0.002, (name, a, b)


def test_a_step_is_scheduled_dispatched_run_and_collected_in_this_order(cramped):
    tracks, _, _, _ = cramped
    device = [span for name in tracks if name.startswith("device") for span in tracks[name]]
    steps = {span["args"]["step"]: span for span in device}
    assert sorted(steps) == list(range(1, len(steps) + 1))
    by_step = lambda name: {s["args"]["step"]: s for s in tracks[name]}  # noqa: E731
    schedule, dispatch = by_step("schedule"), by_step("dispatch")
    collect = by_step("collect sampled tokens")
    assert schedule.keys() == dispatch.keys() == collect.keys() == steps.keys()
    end = lambda span: span["ts"] + span["dur"]  # noqa: E731
    for step, span in steps.items():
        assert end(schedule[step]) <= dispatch[step]["ts"] + 0.002
        assert end(dispatch[step]) <= span["ts"] + 0.002
        assert end(collect[step]) <= end(span) + 0.002


def test_the_next_step_is_dispatched_before_this_one_is_collected(cramped):
    tracks, _, _, _ = cramped
    device = [span for name in tracks if name.startswith("device") for span in tracks[name]]
    assert {name for name in tracks if name.startswith("device")} == {"device 0", "device 1"}
    device.sort(key=lambda span: span["args"]["step"])
    overlap = sum(b["ts"] < a["ts"] + a["dur"] for a, b in pairwise(device))
    assert overlap > 0.8 * len(device)
    dispatch = sorted(tracks["dispatch"], key=lambda span: span["args"]["step"])
    collect = sorted(tracks["collect sampled tokens"], key=lambda span: span["args"]["step"])
    ahead = [
        step
        for step, (late, early) in enumerate(zip(dispatch[1:], collect, strict=False), 1)
        if late["ts"] + late["dur"] <= early["ts"] + 0.002
    ]
    assert len(ahead) == overlap


def test_what_a_step_says_of_itself_is_what_the_engine_counted(cramped):
    tracks, _, stats, _ = cramped
    args = [span["args"] for span in tracks["schedule"]]
    assert sum(a["padding"] for a in args) == stats.padded_tokens
    assert sum(a["padding"] + a["tokens"] for a in args) == stats.bucket_tokens
    assert sum(a["preemptions"] for a in args) == stats.num_preemptions > 0
    assert sum(a["saves"] for a in args) == stats.pages_saved > 0
    assert sum(a["loads"] for a in args) == stats.pages_loaded > 0
    assert all(a["tokens"] == a["decodes"] + a["prompt_tokens"] for a in args)
    assert all(a["bucket"].split()[0] == f"T={a['tokens'] + a['padding']}" for a in args)
    detokenised = sum(span["args"]["tokens"] for span in tracks["detokenise"])
    assert detokenised == 2 * 16 * PARAMS.max_tokens
    # Every output token but a choice's first is a decode's; recomputed ones are chunks.
    assert 0 < sum(a["decodes"] for a in args) <= detokenised - 2 * 16
    assert sum(a["decodes"] > 0 < a["prompts"] for a in args), "steps mix the two"


def test_every_page_that_moves_or_does_not_says_why_in_numbers(cramped):
    _, instants, stats, evicted = cramped
    told = defaultdict(list)
    for event in instants:
        told[event["name"]].append(event["args"])
    assert told.keys() == {"save", "drop", "load", "recompute"}
    assert len(told["save"]) == stats.pages_saved
    assert len(told["load"]) == stats.pages_loaded
    assert len(told["save"]) + len(told["drop"]) == evicted
    for choice, all_args in told.items():
        for args in all_args:
            move, compute = args["seconds_to_move"], args["seconds_to_compute"]
            assert args["pages"] == 1 and 1 <= args["tokens"] <= 4
            assert 0 <= args["chance"] <= 1
            if choice in ("save", "load"):
                assert move < compute and args["reason"].endswith("to compute")
            elif "ms to move" in args["reason"]:
                assert move >= compute
            else:
                assert args["reason"] in (
                    "host memory is full of what is wanted",
                    "what comes before it is gone",
                )
    dear = [a for a in told["recompute"] if a["seconds_to_move"] >= 10]
    assert dear and all(a["reason"].startswith("1e+04 ms to move >= ") for a in dear)


def test_without_host_memory_nothing_is_weighed(tiny_model, tmp_path):
    path = tmp_path / "t.json"
    options = {"num_gpu_blocks_override": 30, "swap_space": 0.0}
    with LLM(str(tiny_model), trace=str(path), **options, **SIZES) as llm:
        llm.generate(crowd(4), PARAMS, use_tqdm=False)
    _, instants = read(path)
    assert {event["name"] for event in instants} == {"drop"}
    assert {e["args"]["reason"] for e in instants} == {"there is no host memory for pages"}


def test_the_file_is_whole_after_every_write_and_replaces_what_was_there(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("x" * 10_000)
    trace = Trace(TraceFile(str(path)), "test")
    before = json.loads(path.read_text())
    for tokens in range(1500):
        trace.detokenised(0.0, tokens)
        if not tokens % 100:
            json.loads(path.read_text())
    written = json.loads(path.read_text())
    assert len(before) < len(written) <= len(before) + 1500
    trace.flush()
    assert len(json.loads(path.read_text())) == len(before) + 1500
    trace.close()
    trace.detokenised(0.0, 1)
    trace.close()
    assert len(json.loads(path.read_text())) == len(before) + 1500


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_stopped_leaves_a_whole_file(tmp_path, number):
    path = tmp_path / "t.json"
    code = f"""
import time
from llmjax.engine.trace import Trace, TraceFile
trace = Trace(TraceFile({str(path)!r}), "test")
print("ready", flush=True)
while True:
    trace.detokenised(time.perf_counter(), 1)
    time.sleep(1e-4)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        process.stdout.readline()
        size = path.stat().st_size
        while path.stat().st_size < 20 * size:
            assert process.poll() is None
        process.send_signal(number)
        process.wait(60)
    assert len(json.loads(path.read_text())) > 100


@pytest.mark.parametrize("path", ["/no/such/folder/t.json", "/dev/null", "\0"])
def test_a_file_that_cannot_be_written_is_refused(path, tiny_model):
    with pytest.raises(ConfigError, match=r"trace is .*, allowed: a"):
        LLM(str(tiny_model), trace=path, **SIZES)


def test_an_engine_without_a_trace_tells_nobody(tiny_model):
    with LLM(str(tiny_model), num_gpu_blocks_override=60, **SIZES) as llm:
        assert type(llm.engine.trace) is NoTrace
        assert llm.engine.cache.store.on_decision is None
