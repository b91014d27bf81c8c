"""Two processes, a device each, serve a model as one does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llmjax import LLM, SamplingParams
from llmjax.config import EngineConfig
from llmjax.distributed import DistributedConfig, check_together
from llmjax.errors import ConfigError

ROOT = Path(__file__).parents[2]
SIZES = {
    "block_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "token_buckets": 16,
    "seq_buckets": 4,
    "prefill_chunk_size": 16,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 26,
    "swap_space": 0.1,
    "forecast_margin": "none",
    "kv_eviction": "snapkv",
    "kv_budget": 32,
}
PROMPTS = ["a", "hello there", "hello there you two", "x" * 20, "abc" * 8, "hello there, again"]
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


class Pair:
    """Both processes; `url` is the leader's, once it is ready."""

    def __init__(self, model: Path, cache: Path):
        with closing(socket.create_server(("127.0.0.1", 0))) as sock:
            address = f"127.0.0.1:{sock.getsockname()[1]}"
        flags = {"coordinator_address": address, "num_processes": 2, "process_timeout": 5}
        options = SIZES | flags | {"tensor_parallel_size": 2, "port": 0, "served_model_name": "m"}
        command = [
            sys.executable,
            "-m",
            "llmjax_serving.cli",
            "serve",
            str(model),
            "--no-background",
        ]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        path = os.pathsep.join(str(ROOT / p) for p in (".", "kernels", "serving"))
        env = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "LLMJAX_CACHE": str(cache)}
        self.leader, self.worker = (
            subprocess.Popen(
                [*command, "--process-id", str(index)],
                env=os.environ | env,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(2)
        )
        assert self.leader.stdout is not None
        ready = next(line for line in self.leader.stdout if line.startswith("Ready: "))
        self.url = ready.split()[1]

    def complete(self, prompt: str, **options: Any) -> tuple[int, dict[str, Any]]:
        body = {"model": "m", "prompt": prompt, **options}
        request = urllib.request.Request(
            f"{self.url}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture(scope="module")
def pair(tiny_model, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(tiny_model, request.config.cache.mkdir("llmjax"))
    yield pair
    for process in (pair.leader, pair.worker):
        process.kill()
        process.communicate()


def test_the_same_tokens_as_one_process(pair, tiny_model):
    """More at once than fit, so that pages go to host memory and come back, and longer than what
    is kept; masks and scores."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: pair.complete(prompt, **GREEDY), PROMPTS))
    chosen = pair.complete("so: ", structured_outputs={"choice": ["yes", "no"]}, max_tokens=8)
    scored = pair.complete("hello you", prompt_logprobs=0, max_tokens=1, temperature=0)
    sizes = SIZES | {"token_buckets": [16], "seq_buckets": [4], "forecast_margin": None}
    with LLM(str(tiny_model), **sizes) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False)
        params = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0)
        [one] = llm.generate(["hello you"], params, use_tqdm=False)
    assert [status for status, _ in answers] == [200] * len(PROMPTS)
    found = [answer["choices"][0]["text"] for _, answer in answers]
    assert found == [output.outputs[0].text for output in outputs]
    assert chosen[1]["choices"][0]["text"] in ("yes", "no")
    of_prompt = scored[1]["choices"][0]["prompt_logprobs"][1:]
    ids = one.prompt_token_ids[1:]
    ours = [entry[str(token)]["logprob"] for token, entry in zip(ids, of_prompt, strict=True)]
    theirs = [e[t].logprob for t, e in zip(ids, one.prompt_logprobs[1:], strict=True)]
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_a_lost_process_ends_all(pair):
    """The last of its pair."""
    pair.worker.kill()
    status, answer = pair.complete("hello", **GREEDY)
    assert (status, answer["error"]["code"]) == (503, "engine_dead")
    assert "2 processes" in answer["error"]["message"] or "process 1" in answer["error"]["message"]
    assert pair.leader.wait(30) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 2}, "num_processes is 2, allowed: none, as coordinator_address is None"),
        ({"coordinator_address": "here"}, "coordinator_address is 'here', allowed: HOST:PORT"),
        ({"coordinator_address": "a:1", "process_id": 0}, "num_processes is needed"),
        (
            {"coordinator_address": "a:1", "num_processes": 2, "process_id": 2},
            "process_id is 2, allowed: 0 to 1",
        ),
        ({"coordinator_address": "auto", "process_id": 0}, "process_id is 0, allowed: none"),
        ({"process_timeout": 0.5}, "process_timeout is 0.5, allowed: 1 up"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        DistributedConfig(**options)


def test_prefill_workers_are_refused():
    with pytest.raises(ConfigError, match=r"prefill_from is .*, allowed with coordinator_address"):
        check_together(EngineConfig.of("some/path", prefill_from="tcp://there:9000"))
