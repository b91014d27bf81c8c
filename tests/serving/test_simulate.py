"""`llmjax simulate` from end to end, in one process: it needs no model and no device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from llmjax_serving.cli import main

TRACES = Path(__file__).parents[1] / "simulate"
AZURE, MOONCAKE = str(TRACES / "azure.csv"), str(TRACES / "mooncake.jsonl")


def simulate(capsys, *argv: str) -> str:
    assert main(["simulate", *argv]) == 0
    return capsys.readouterr().out


def test_a_trace_with_baselines_as_table_json_and_picture(capsys, tmp_path):
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    load = ("--trace", AZURE, "--rate-scale", "20", "--baselines")
    slo = ("--slo-ttft-ms", "200", "--slo-itl-ms", "50")
    out = simulate(capsys, *load, *slo, "--output-json", str(file), "--plot", str(picture))
    said = json.loads(file.read_text())
    names = ["llmjax", "static batching", "contiguous, max", "contiguous, pow2"]
    assert [result["name"] for result in said["results"]] == names
    assert all(name in out for name in names)
    assert "llama-3-8b on h100: 25,239 pages of 16 tokens, context 8,192" in out
    assert "40 requests (azure.csv)" in out
    assert said["load"]["requests"] == 40
    assert said["machine"]["figures"]["bandwidth"] == 3.35e12
    for result in said["results"]:
        assert 0 < result["slo_kept"] <= 1
        assert result["ttft_ms"].keys() == {"mean", "p50", "p90", "p99"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_each_baseline_can_be_asked_for(capsys):
    out = simulate(capsys, "--trace", AZURE, "--baselines", "static", "--num-requests", "10")
    assert "static batching" in out and "contiguous" not in out


def test_hash_ids_reach_the_prefix_cache(capsys, tmp_path):
    file = tmp_path / "out.json"
    model = ("--model", "llama-3.1-70b", "--tensor-parallel-size", "8", "--device", "a100-80gb")
    out = simulate(capsys, "--trace", MOONCAKE, *model, "--output-json", str(file))
    assert "llama-3.1-70b on 8 x a100-80gb" in out
    assert json.loads(file.read_text())["results"][0]["prefix_hit_rate"] > 0.2
    off = ("--no-enable-prefix-caching", "--output-json", str(file))
    simulate(capsys, "--trace", MOONCAKE, *model, *off)
    assert json.loads(file.read_text())["results"][0]["prefix_hit_rate"] == 0


def test_a_random_load_is_the_same_by_its_seed(capsys):
    load = (
        "--request-rate",
        "50",
        "--num-requests",
        "50",
        "--input-len",
        "40",
        "--output-len",
        "9",
    )
    model = ("--model", "smollm2-135m", "--device", "cpu", "--weight-dtype", "int8")
    outs = [simulate(capsys, *load, *model, "--seed", seed) for seed in ("1", "1", "2")]
    assert outs[0] == outs[1] != outs[2]
    assert "50 requests (at random)" in outs[0]


def test_capacity_says_how_many_devices(capsys, tmp_path):
    file = tmp_path / "out.json"
    load = ("--trace", AZURE, "--request-rate", "40", "--device", "l4", "--output-json", str(file))
    question = ("--capacity", "--p99-ttft-ms", "1000")
    for routing in ("round-robin", "least-loaded"):
        out = simulate(capsys, *load, *question, "--routing", routing)
        said = json.loads(file.read_text())["capacity"]
        needed = said["replicas"]
        assert needed > 1
        assert f"{needed} l4 ({needed} replicas) keep p99 of the first token within 1000 ms" in out
        assert said["p99_ttft_ms"][str(needed)] <= 1000 < said["p99_ttft_ms"][str(needed - 1)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "a load is needed: --trace FILE, or --request-rate X"),
        (("--rate-scale", "2"), "rate_scale needs a --trace"),
        (("--trace", AZURE, "--seed", "1"), "seed is of a load at random"),
        (("--trace", AZURE, "--input-len", "1"), "input_len is of a load at random"),
        (("--trace", AZURE, "--rate-scale", "1", "--request-rate", "1"), "both set the rate"),
        (("--trace", AZURE, "--num-requests", "41"), "num_requests is 41, the trace has 40"),
        (("--trace", AZURE, "--rate-scale", "0"), "rate_scale is 0.0, allowed: above 0"),
        (("--trace", AZURE, "--rate-scale", "1e-300"), "rate_scale is 1e-300, allowed: enough for"),
        (("--request-rate", "1e-300"), "request_rate is 1e-300, allowed: enough for the last"),
        (
            ("--trace", AZURE, "--num-requests", "1", "--request-rate", "10"),
            "request_rate is 10.0, allowed of a trace whose requests all arrive at once: none",
        ),
        (("--trace", AZURE, "--plot", "x.nothing"), "plot is 'x.nothing', allowed: a name that"),
        (("--trace", "/no/such/file"), "cannot read the trace /no/such/file"),
        (("--request-rate", "1", "--length-spread", "2"), "length_spread is 2.0, allowed: 0 to 1"),
        (("--request-rate", "1", "--seed", "-1"), "seed is -1, allowed: 0 up"),
        (("--trace", AZURE, "--capacity"), "capacity and p99_ttft_ms are given together"),
        (("--trace", AZURE, "--p99-ttft-ms", "9"), "capacity and p99_ttft_ms are given together"),
        (
            ("--trace", AZURE, "--capacity", "--p99-ttft-ms", "9", "--replicas", "2"),
            "capacity finds the number of replicas",
        ),
        (("--trace", AZURE, "--replicas", "2", "--baselines"), "baselines are of one replica"),
        (("--trace", AZURE, "--replicas", "0"), "replicas is 0, allowed: 1 to"),
        (("--trace", AZURE, "--slo-itl-ms", "0"), "slo_itl_ms is 0, allowed: above 0"),
        (("--trace", AZURE, "--tensor-parallel-size", "3"), "divisors of the 32 heads"),
        (("--trace", AZURE, "--model", "gpt-2"), "model is 'gpt-2', allowed: llama-3-8b"),
        (("--trace", AZURE, "--max-model-len", "9000"), "max_model_len is 9000, the model allows"),
        (("--trace", AZURE, "--model", "llama-3-70b"), "no memory is left for KV pages"),
        (("--trace", AZURE, "--max-num-seqs", "0"), "max_num_seqs is 0"),
        (("--trace", AZURE, "--token-buckets", "64"), "token_buckets is (64,), allowed"),
        (("--trace", AZURE, "--plot", "/no/such/x.png"), "cannot write --plot /no/such/x.png"),
        (
            ("--trace", AZURE, "--output-json", "/no/such/x"),
            "cannot write --output-json /no/such/x",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused(capsys, argv, message):
    assert main(["simulate", *argv]) == 1
    assert message in capsys.readouterr().err


def test_requests_at_one_instant_are_served_and_have_no_rate_to_scale(capsys, tmp_path):
    trace, file = tmp_path / "trace.csv", tmp_path / "out.json"
    row = "2023-11-16 18:15:46.6805900,374,44\n"
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{row}{row}")
    load = ("--trace", str(trace), "--output-json", str(file))
    out = simulate(capsys, *load, "--capacity", "--p99-ttft-ms", "1000")
    assert "2 requests (trace.csv), all at once, on average 374 tokens in and 44 out" in out
    assert "within 1000 ms with all requests at once." in out
    said = json.loads(file.read_text())
    assert said["load"]["requests_per_second"] is None
    assert said["results"][0]["requests"] == 2
    for flag, name in (("--request-rate", "request_rate"), ("--rate-scale", "rate_scale")):
        assert main(["simulate", *load, flag, "10"]) == 1
        assert capsys.readouterr().err == (
            f"llmjax: error: {name} is 10.0, allowed of a trace whose requests all arrive at once: "
            "none, as they have no rate to scale\n"
        )


@pytest.mark.parametrize("question", [(), ("--capacity", "--p99-ttft-ms", "1000")])
def test_without_matplotlib_nothing_runs_and_no_file_is_left(
    question, capsys, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("llmjax_serving.cli.simulate.make_load", lambda args: 1 / 0)
    files = ("--plot", str(tmp_path / "p.png"), "--output-json", str(tmp_path / "p.json"))
    assert main(["simulate", "--trace", AZURE, *question, *files]) == 1
    said = "llmjax: error: plots need matplotlib: pip install matplotlib\n"
    assert capsys.readouterr().err == said
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused_late_leaves_no_file_and_old_ones_as_they_were(capsys, tmp_path):
    picture, old = tmp_path / "p.png", tmp_path / "p.json"
    old.write_text("{}")
    files = ("--plot", str(picture), "--output-json", str(old))
    assert main(["simulate", "--trace", "/no/such/file", *files]) == 1
    assert list(tmp_path.iterdir()) == [old] and old.read_text() == "{}"
