"""`llmjax advise` from end to end."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from llmjax.config import EngineConfig
from llmjax_serving.cli import main, make_parser
from llmjax_serving.cli.flags import engine_options

FIXTURES = Path(__file__).parents[1] / "models/fixtures"
CPU = ("--gpu", "cpu", "--bandwidth-gbs", "24", "--int8-tops", "1.5", "--memory-gb", "64")


def advise(capsys, *argv: str) -> str:
    assert main(["advise", *argv]) == 0
    return capsys.readouterr().out


def test_the_table_and_its_reasons(capsys):
    out = advise(capsys, "--model", "llama-3-8b", "--gpu", "h100", "--p99", "20")
    assert out.startswith(
        "llama-3-8b on h100: 1,024 tokens in, 256 out, p99 of a whole answer: 20 s"
    )
    assert "Advice: fp8 with KV in bfloat16, up to 355 at a time, without speculation" in out
    assert "16.06 GB in 16 bits" in out
    assert "2 x 32 layers x 8 heads x 256 bytes" in out
    assert "NVIDIA H100 data sheet" in out.replace("\n", " ")
    header, *rows = out[out.index("GPUs  weights GB") :].splitlines()
    assert header.split()[-2:] == ["perplexity", "llmjax"]
    floats = next(row.split() for row in rows if row.startswith("  bf16, bfloat16"))
    assert floats[2:6] == ["1", "16.06", "131,072", "314"]
    assert sum(row.startswith("* ") for row in rows) == 1
    assert all(len(line) <= 100 for line in out[: out.index("GPUs  weights GB")].splitlines()[:-1])


def test_json_has_all_figures(capsys):
    argv = ("--model", "llama-3-70b", "--gpu", "a100", "--goal", "latency", "--json")
    said = json.loads(advise(capsys, *argv))
    best = said["candidates"][said["best"]]
    assert (best["scheme"], best["kv_dtype"], best["possible"]) == ("awq", "bfloat16", True)
    assert best["memory"]["kv_token"] == 327_680
    assert best["estimate"]["decode"]["bound"] in ("bytes", "operations")
    assert best["weights_quality"]["ratio"] is None
    assert said["question"]["gpu"] == "a100" and said["figures"]["memory"] == 80e9
    assert said["rule"]["scheme"] == "awq"
    assert said["reasons"]
    assert said["candidates"][said["today"]]["served"]["today"]


def test_each_flag_has_its_own_help(capsys):
    with pytest.raises(SystemExit):
        main(["advise", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "--p99 X seconds within which 99 of 100 answers end" in words
    assert "--int8-tops X 1e12 operations a second of 8 bits" in words
    assert "raise it by more than 10%. [normal]" in words


def test_a_config_and_a_file_are_models(capsys):
    folder, file = str(FIXTURES / "gemma2"), str(FIXTURES / "gguf" / "llama-q4_k_m.gguf")
    lengths = ("--input-len", "40", "--output-len", "8")
    assert "2 layers keep a window of 32" in advise(capsys, "--model", folder, *CPU, *lengths)
    out = advise(capsys, "--model", file, *CPU, *lengths)
    assert "llama-q4_k_m is quantised already (Q4_K)" in out


@pytest.mark.parametrize("gpu", ["h100", "a100", "l4", "t4", "b200", "cpu"])
@pytest.mark.parametrize("goal", ["throughput", "latency"])
def test_lines_that_serve_are_lines_that_the_server_takes(capsys, gpu, goal):
    where = CPU if gpu == "cpu" else ("--gpu", gpu)
    argv = ("--model", "llama-3-8b", *where, "--goal", goal, "--gpu-memory-utilization", "0.8")
    served = [c["served"] for c in json.loads(advise(capsys, *argv, "--json"))["candidates"]]
    lines = [each["how"] for each in served if each["today"]]
    assert lines
    for line in lines:
        program, *rest = shlex.split(line)
        assert program == "llmjax"
        config = EngineConfig.of(**engine_options(make_parser().parse_args(rest)))
        assert config.cache.gpu_memory_utilization == 0.8
        assert config.model.max_model_len == 1280


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--model", "llama-3-8b", "--gpu", "tpu"), "gpu is 'tpu', allowed: a100,"),
        (("--model", "no-such", "--gpu", "h100"), "no model is called 'no-such'"),
        (("--model", "llama-3-70b", "--gpu", "l4", "--gpus", "1"), "does not fit on 1 l4"),
        (("--model", "llama-3-8b", "--gpu", "h100", "--p99", "-1"), "p99 is -1.0, allowed"),
        (("--model", "llama-3-8b", "--gpu", "h100", "--int8-tops", "1"), "with gpu cpu"),
    ],
)
def test_what_cannot_be_advised_is_one_line(capsys, argv, message):
    assert main(["advise", *argv]) == 1
    err = capsys.readouterr().err
    assert message in err and err.startswith("llmjax: error: ") and err.count("\n") == 1


@pytest.mark.parametrize("name", ["model", "gpu"])
def test_a_model_and_a_gpu_are_needed(capsys, name):
    argv = {"model": ("--gpu", "h100"), "gpu": ("--model", "llama-3-8b")}[name]
    with pytest.raises(SystemExit) as exit:
        main(["advise", *argv])
    assert exit.value.code == 2
    assert f"a {name} is needed: --{name} NAME" in capsys.readouterr().err
