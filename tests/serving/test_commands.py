"""Commands that load a model, on a tiny one, in processes of their own."""

from __future__ import annotations

import json

GREEDY = ("--temperature", "0", "--max-tokens", "8")


def test_generate_says_what_the_server_says(llmjax, server):
    prompts = ["The engine reads", "She sells"]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 8}
    _, answer = server.call("/v1/completions", body)
    first, second = (choice["text"] for choice in answer["choices"])
    assert llmjax("generate", prompts[0], *GREEDY) == first + "\n"
    assert llmjax("generate", *GREEDY, stdin=prompts[0]) == first + "\n"
    both = llmjax("generate", *prompts, *GREEDY)
    assert first in both and second in both


def test_chat_answers_each_turn_and_forgets_on_reset(llmjax, server):
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8}
    _, answer = server.call("/v1/chat/completions", body)
    said = answer["choices"][0]["message"]["content"] + "\n"
    out = llmjax("chat", *GREEDY, stdin="Hello\n/reset\n\nHello\nHello\n/exit\nHello\n")
    assert out.startswith(said * 2)
    assert len(out) > len(said * 2)


def test_bench_throughput_counts_what_it_asked_for(llmjax, tmp_path):
    report = tmp_path / "report.json"
    texts = tmp_path / "prompts.jsonl"
    texts.write_text('{"prompt": "The engine"}\n{"prompt": "She sells sea shells"}\n')
    load = ("--num-prompts", "3", "--input-len", "10", "--output-len", "4")
    out = llmjax("bench", "throughput", *load, "--output-json", str(report))
    said = json.loads(report.read_text())
    assert (said["num_prompts"], said["prompt_tokens"], said["output_tokens"]) == (3, 30, 12)
    assert said["options"]["max_num_seqs"] == 8
    assert "output tokens           12" in out
    llmjax("bench", "throughput", *load, "--dataset", str(texts), "--output-json", str(report))
    assert json.loads(report.read_text())["num_prompts"] == 3


def test_bench_latency_runs_every_case_it_was_asked_for(llmjax, tmp_path):
    report = tmp_path / "report.json"
    load = ("--input-len", "24", "--output-len", "4", "--num-iters", "2")
    out = llmjax(
        *("bench", "latency", "--batch-sizes", "1", "8", *load, "--output-json", str(report))
    )
    said = json.loads(report.read_text())
    assert [case["batch_size"] for case in said["decode"]] == [1, 8]
    for case in (*said["decode"], said["prefill"]):
        assert {"tokens_per_second", "ms"} < case.keys() and len(case["ms_of_runs"]) == 2
    assert (said["prefill"]["input_len"], said["output_len"]) == (24, 4)
    assert said["work"].keys() == {"weight_bytes", "kv_bytes", "ops", "head_ops"}
    assert said["options"]["background"] is False
    for row in ("decode, 1 stream ", "decode, 8 streams ", "prefill of 24 "):
        assert row in out
