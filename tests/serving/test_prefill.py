"""`llmjax prefill` and `llmjax serve --prefill-from`, in processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmjax_serving.cli import main

from .conftest import MODEL, PROGRAM, Served

SHM = f"shm://test-{os.getpid()}"


@pytest.fixture
def start(environment):
    """Starts processes, and kills those that are left."""
    processes = []

    def start(*argv):
        command = [*PROGRAM, *argv, *MODEL, "--log-level", "warning"]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def ready(worker):
    for line in worker.stdout:
        if line.startswith("Ready: "):
            return line.split()[1]
    raise AssertionError(worker.communicate()[1])


def bodies(first):
    for i in range(first, first + 12):
        prompt = f"{i}: what {'long ' * (i % 7)}stories do they tell of the sea, and to whom?"
        yield {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        seeded = {"n": 2, "seed": i, "temperature": 0.8, "logprobs": 1}
        yield {"prompt": prompt[::-1], "max_tokens": 12, "ignore_eos": True, **seeded}


def ask(server, load):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: server.call("/v1/completions", body), load))
    assert {status for status, _ in answers} == {200}
    return [[c["text"] for c in answer["choices"]] for _, answer in answers]


def test_two_workers_one_of_which_is_killed(start, server):
    workers = [start("prefill", "--listen", at) for at in ("tcp://127.0.0.1:0", SHM)]
    addresses = [ready(worker) for worker in workers]
    assert addresses[1] == SHM
    apart = ("--prefill-from", ",".join(addresses), "--prefill-min-tokens", "16")
    ours = Served(start("serve", "--port", "0", *apart))
    assert ours.metric("prefill_workers_up") == 2
    load = list(bodies(0))
    assert ask(ours, load) == ask(server, load)
    assert ours.metric("prefill_pages_total") > 0
    assert ours.metric("prefill_jobs_failed_total") == 0

    load = list(bodies(100))
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask, ours, load)
        before = ours.metric("prefill_jobs_total")
        while ours.metric("prefill_jobs_total") < before + 3 and not answers.done():
            pass
        workers[0].kill()
        assert answers.result() == ask(server, load)
    assert ours.metric("prefill_workers_up") == 1

    workers[1].send_signal(signal.SIGTERM)
    assert workers[1].wait(60) == 0
    load = list(bodies(200))
    assert ask(ours, load) == ask(server, load)
    for gauge in ("num_requests_held", "kv_cache_pages_used", "prefill_workers_up"):
        assert ours.metric(gauge) == 0
    assert ours.stop() == 0
    told = ours.process.stderr.read()
    assert f"the prefill worker at {SHM} is lost" in told
    assert "Traceback" not in told


def test_a_worker_of_another_kind_is_one_line(start):
    worker = start("prefill", "--listen", "tcp://127.0.0.1:0", "--kv-cache-dtype", "int8")
    address = ready(worker)
    server = start("serve", "--port", "0", "--prefill-from", address)
    assert server.wait(120) == 1
    error = [line for line in server.stderr.read().splitlines() if line.startswith("llmjax: ")]
    assert error == [
        f"llmjax: error: KV cache dtype: the prefill worker at {address} has 'int8', and this "
        "engine 'bfloat16', allowed: the same, or pages of one are of no use to the other"
    ]
    worker.send_signal(signal.SIGINT)
    assert worker.wait(60) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("prefill", "m", "--listen", "memory"), "listen is 'memory', allowed: tcp://HOST:PORT or"),
        (("prefill", "m", "--listen", "9000"), "the address of a prefill worker is '9000', allo"),
        (
            ("prefill", "m", "--kv-eviction", "streaming"),
            "kv_eviction is 'streaming', allowed of a prefill worker: none",
        ),
        (
            ("serve", "m", "--kv-eviction", "snapkv", "--prefill-from", "memory"),
            "kv_eviction is 'snapkv', allowed with prefill_from: none",
        ),
        (("serve", "m", "--prefill-from", "http://h:1"), "prefill_from is 'http://h:1', allowed"),
        (("serve", "m", "--prefill-from", "memory,memory"), "prefill_from is ('memory', 'memory')"),
        (("serve", "m", "--prefill-min-tokens", "0"), "prefill_min_tokens is 0, allowed: 1 or mo"),
        (("serve", "m", "--prefill-timeout", "0"), "prefill_timeout is 0.0, allowed: above 0 up"),
    ],
)
def test_what_is_not_allowed_is_one_line(argv, message, capsys):
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"llmjax: error: {message}")
    assert captured.err.count("\n") == 1


def test_a_port_that_is_taken_shows_before_the_model_loads(capsys):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
        assert main(["prefill", "no-such-model", "--listen", address]) == 1
    assert f"cannot listen on {address}" in capsys.readouterr().err


def test_a_worker_has_no_worker(capsys):
    with pytest.raises(SystemExit):
        main(["prefill", "m", "--prefill-from", "memory"])
    assert "unrecognized arguments: --prefill-from" in capsys.readouterr().err
