"""Flags, messages and exit statuses of the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from llmjax.catalogue import CATALOGUE
from llmjax.config import (
    CacheConfig,
    CompileConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from llmjax.errors import ConfigError
from llmjax.request import SamplingParams
from llmjax_serving.cli import COMMANDS, main, make_parser
from llmjax_serving.cli.flags import attribute_docs, engine_options
from llmjax_serving.cli.generate import sampling_params
from llmjax_serving.config import ServerConfig

ROOT = Path(__file__).parents[2]


def parse(*argv: str):
    return make_parser().parse_args(argv)


def run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "serving"))
    return subprocess.run(
        [sys.executable, *argv],
        env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_flags_carry_vllm_names_and_fill_the_configuration():
    args = parse(
        *("serve", "--model", "m", "--dtype", "float32", "--max-model-len", "512"),
        *("--gpu-memory-utilization", "0.5", "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "128", "--max-paddings", "0.2"),
        *("--no-enable-chunked-prefill", "--prefill-chunk-size", "64"),
        *("--mixed-prefill-tokens", "48", "--target-itl-ms", "30"),
        *("--served-model-name", "s", "--seed", "1", "--block-size", "32"),
        *("--num-gpu-blocks-override", "99", "--chat-template", "t.jinja"),
        *("--max-logprobs", "5", "--token-buckets", "32,128", "--seq-buckets", "8"),
        *("--page-buckets", "4,16", "--max-queue-len", "none", "--trace", "t.json"),
        *("--metrics-alias", "vllm", "--log-stats-interval", "2.5"),
        *("--host", "::", "--port", "81", "--api-key", "k,l", "--shutdown-timeout", "1.5"),
    )
    config = EngineConfig.of(**engine_options(args))
    assert config == EngineConfig(
        model=ModelConfig("m", "float32", 512, 1, "s", "t.jinja"),
        cache=CacheConfig(32, 99, 0.5),
        scheduler=SchedulerConfig(8, 128, 0.2, False, 64, 48, 30.0, max_queue_len=None),
        compile=CompileConfig((32, 128), (8,), (4, 16)),
        max_logprobs=5,
        trace="t.json",
    )
    assert (args.metrics_alias, args.log_stats_interval) == ("vllm", 2.5)
    assert (args.host, args.port, args.api_key, args.shutdown_timeout) == (
        "::",
        81,
        ("k", "l"),
        1.5,
    )


def test_what_is_not_given_is_left_to_the_dataclass():
    assert engine_options(parse("serve", "m")) == {"model": "m"}
    assert engine_options(parse("serve", "--model", "m", "m")) == {"model": "m"}
    assert not hasattr(parse("serve", "m"), "port")


@pytest.mark.parametrize("argv", [("serve",), ("serve", "a", "--model", "b")])
def test_the_model_is_needed_once(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        engine_options(parse(*argv))
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert "model" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("serve m --port 1.5", "--port is '1.5', allowed: an integer"),
        ("serve m --max-model-len 1k", "--max-model-len is '1k', allowed: an integer, or none"),
        (
            "serve m --token-buckets 1,2,x",
            "--token-buckets is '1,2,x', allowed: integers with commas between, or none",
        ),
        ("serve m --swap-space lots", "--swap-space is 'lots', allowed: a number"),
        ("serve m --log-level loud", "--log-level is 'loud', allowed: debug, info, warning, error"),
        ("serve m --portt 1", "unrecognized arguments: --portt 1"),
        ("serve m --port", "--port: expected one argument"),
        ("generate --max-tokens 1e9", "--max-tokens is '1e9', allowed: an integer, or none"),
        ("bench throughput --num-prompts nan", "--num-prompts is 'nan', allowed: an integer"),
        ("bench latency --batch-sizes 1 x", "--batch-sizes is 'x', allowed: an integer"),
        ("simulate --device h999", "--device is 'h999', allowed: h100, h200, a100-80gb, l4, t4,"),
        ("simulate --request-rate x", "--request-rate is 'x', allowed: a number"),
        ("convert a", "the following arguments are required: DST"),
        ("bench nothing", "KIND is 'nothing', allowed: throughput, latency, serve, startup"),
        ("nothing", "COMMAND is 'nothing', allowed: serve, prefill, generate, run-batch, chat,"),
    ],
)
def test_what_cannot_be_read_is_one_line_that_says_what_can(argv, message, capsys):
    words = argv.split()
    depth = 2 if words[0] == "bench" else 1
    if words[-1] == "nothing":
        depth -= 1
    program = " ".join(["llmjax", *words[:depth]])
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"{program}: error: {message}")
    assert captured.err.endswith(f" (see {program} --help)\n")
    assert captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize(
    "cls", [ModelConfig, CacheConfig, SchedulerConfig, CompileConfig, ServerConfig]
)
def test_every_flag_has_help(cls):
    docs = attribute_docs(cls)
    assert docs.keys() == {field.name for field in fields(cls)}
    assert all(doc and "\n" not in doc for doc in docs.values())


def test_sampling_flags():
    args = parse("generate", "--model", "m", "a", "--temperature", "0", "--max-tokens", "8")
    assert sampling_params(args) == SamplingParams(temperature=0, max_tokens=8)
    args = parse("chat", "m", "--stop", "x", "--stop", "y", "--ignore-eos")
    assert sampling_params(args, max_tokens=None) == SamplingParams(
        max_tokens=None, stop=["x", "y"], ignore_eos=True
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(command, "--help")
    assert caught.value.code == 0
    assert "usage: llmjax" in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "bench"])
def test_no_help_speaks_python(command, capsys):
    with pytest.raises(SystemExit):
        parse(command, "--help")
    assert "None" not in capsys.readouterr().out


def test_pull_lists_the_catalogue(capsys):
    with pytest.raises(SystemExit):
        parse("pull", "--help")
    out = capsys.readouterr().out
    for entry in CATALOGUE.values():
        (line,) = (line for line in out.splitlines() if line.split()[:1] == [entry.name])
        assert f" {entry.size / 1e6:.0f} MB" in line
    assert "smollm2-135m-instruct       98 MB" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("generate", "--model", "", "a"), "no model is called ''; give a catalogue name"),
        (("chat", "--model", ""), "no model is called ''; give a catalogue name"),
        (("convert", "", "out"), "no model is called ''; give a catalogue name"),
        (("pull", ""), "no model is called ''; give a catalogue name"),
        (
            ("bench", "throughput", "--model", "m", "--output-json", "/no/such/folder/x.json"),
            "cannot write --output-json /no/such/folder/x.json",
        ),
        (("serve", "m", "--max-num-seqs", "0"), "max_num_seqs is 0, allowed: 1 up"),
        (("serve", "m", "--port", "99999"), "port is 99999, allowed: 0 to 65535"),
        (("serve", "m", "--api-key", ""), "api_key has an empty key"),
        (("generate", "--model", "m", "a", "--temperature", "9"), "temperature is 9.0, allowed"),
        (("generate", "--model", "m", ""), "a prompt is empty"),
        (("bench", "throughput", "--model", "m", "--num-prompts", "0"), "num_prompts is 0"),
        (("bench", "latency", "--model", "m", "--num-iters", "0"), "num_iters is 0, allowed: 1 or"),
        (
            ("bench", "latency", "--model", "m", "--max-num-seqs", "8", "--batch-sizes", "1", "9"),
            "batch_sizes is [1, 9], allowed: 1 to max_num_seqs (8)",
        ),
        (("bench", "latency", "--model", "m", "--batch-sizes", "0"), "batch_sizes is [0], allowed"),
        (("bench", "serve", "--model", "m", "--max-concurrency", "0"), "max_concurrency is 0"),
        *(
            (
                ("bench", "serve", "--model", "m", "--base-url", url),
                f"base_url is {url!r}, allowed: a URL such as http://127.0.0.1:8000: http or https"
                ", a host, and a port of 0 to 65535 if any",
            )
            for url in ("localhost:8000", "foo", "http://127.0.0.1:99999", "http://:80", "ftp://h")
        ),
        (("bench", "startup", "--model", "m", "--port", "99999"), "port is 99999, allowed: 1 to"),
        (
            ("bench", "serve", "--model", "m", "--base-url", "http://127.0.0.1:1"),
            "http://127.0.0.1:1/v1/completions does not answer: Cannot connect",
        ),
    ],
)
def test_errors_of_the_users_making_are_one_line(argv, message, capsys):
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"llmjax: error: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("throughput", "--input-len", "99999999"), "input_len + output_len is 100000127, {}128"),
        (("throughput", "--output-len", "125", "--input-len", "4"), "input_len + output_len is"),
        (("throughput", "--output-len", "128", "--dataset", "{texts}"), "dataset's longest prompt"),
        (("latency", "--input-len", "99999999"), "input_len is 99999999, {}127"),
        (("latency", "--input-len", "8", "--output-len", "111"), "output_len is 111, {}110"),
    ],
)
def test_lengths_beyond_the_context_are_refused_before_weights_are_loaded(
    argv, said, tiny_model, tmp_path, capsys, monkeypatch
):
    texts, report = tmp_path / "texts", tmp_path / "report.json"
    texts.write_text("The engine\n")
    monkeypatch.setattr("llmjax.LLM", lambda **options: 1 / 0, raising=False)
    options = ("--model", str(tiny_model), "--max-model-len", "128", "--output-json", str(report))
    argv = tuple(arg.format(texts=texts) for arg in argv)
    assert main(["bench", *argv, *options]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"llmjax: error: {said.format('allowed: up to ')}")
    assert err.endswith(", as the context has 128 tokens (max_model_len)\n")
    assert err.count("\n") == 1
    assert not report.exists()


def test_a_batch_that_cannot_be_run_leaves_its_output_file_as_it_was(tmp_path, capsys):
    asked, given = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "m", "prompt": "a"}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    asked.write_text(json.dumps(line) + "\n")
    argv = ["run-batch", str(tmp_path / "nowhere"), "-i", str(asked), "-o", str(given)]
    assert main(argv) == 1
    assert not given.exists()
    given.write_text("of before")
    assert main(argv) == 1
    assert given.read_text() == "of before"
    assert "nowhere" in capsys.readouterr().err


def test_a_model_that_does_not_exist_is_one_line():
    done = run("-m", "llmjax_serving.cli", "generate", "--model", "./nowhere.gguf", "a")
    assert done.returncode == 1
    assert done.stderr.startswith("llmjax: error: ")
    assert "nowhere.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_chat_without_a_template_is_refused_before_weights_are_loaded(
    tiny_model, tmp_path, capsys, monkeypatch
):
    model = str(shutil.copytree(tiny_model, tmp_path / "base"))
    settings = tmp_path / "base" / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": "</s>"}))

    def load(*args, **options):
        raise ConfigError("the model was loaded")

    monkeypatch.setattr("llmjax.LLM", load, raising=False)
    assert main(["chat", model]) == 1
    err = capsys.readouterr().err
    assert f"{model} has no chat template" in err and "--chat-template FILE" in err
    assert main(["chat", model, "--chat-template", "{{ messages[0].content }}"]) == 1
    assert "the model was loaded" in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    heavy = ["jax", "numpy", "aiohttp", "tokenizers", "prometheus_client", "flax"]
    code = (
        "import sys; from llmjax_serving.cli import make_parser; make_parser().format_help();"
        f"print(sorted(set({heavy}) & set(sys.modules)))"
    )
    done = run("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_collect_env(capsys, monkeypatch):
    monkeypatch.setenv("LLMJAX_API_KEY", "s3cret")
    monkeypatch.setenv("XLA_FLAGS_OF_A_TEST", "--x")
    assert main(["collect-env"]) == 0
    out = capsys.readouterr().out
    for name in ("llmjax:", "python:", "jax:", "cpu features:", "memory:", "device 0:"):
        assert f"\n{name}" in f"\n{out}"
    assert "--x" in out
    assert "s3cret" not in out
