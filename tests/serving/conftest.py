"""The program itself, serving a tiny model in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KEY = "test-key"
PROGRAM = [sys.executable, "-m", "llmjax_serving.cli"]
MODEL = [
    *("--model", str(ROOT / "tests/models/fixtures/smollm2")),
    *("--max-num-seqs", "8", "--seq-buckets", "8"),
    *("--max-num-batched-tokens", "32", "--token-buckets", "32"),
]


class Served:
    """A running `llmjax serve`.

    Args:
        process: with stdout piped; this waits for its word that it is ready.
    """

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        self.banner: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            self.banner.append(line.rstrip("\n"))
            if line.startswith("  curl "):
                break
        else:
            raise AssertionError(f"the server ended with status {process.wait()}")
        ready = next(line for line in self.banner if line.startswith("Ready: "))
        self.url = ready.split()[1].removesuffix("/v1")

    def call(self, path: str, body: Any = None, key: str = KEY) -> tuple[int, Any]:
        """Status and JSON (or text) of a request: POST where there is a body."""
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status, raw = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read().decode()
        return status, json.loads(raw) if raw.startswith("{") else raw

    def metric(self, name: str) -> float:
        _, text = self.call("/metrics")
        line = next(line for line in text.splitlines() if line.startswith(f"llmjax:{name}{{"))
        return float(line.rsplit(" ", 1)[1])

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture(scope="session")
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of our processes; they share what they compile, with later runs too."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "serving")),
        "JAX_PLATFORMS": "cpu",
        "LLMJAX_CACHE": str(request.config.cache.mkdir("llmjax")),
        "LLMJAX_API_KEY": KEY,
    }


@pytest.fixture(scope="session")
def llmjax(environment: dict[str, str]) -> Callable[..., str]:
    """Runs a command on the tiny model and returns what it says."""

    def run(*argv: str, stdin: str = "") -> str:
        done = subprocess.run(
            [*PROGRAM, *argv, *MODEL],
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def serve(environment: dict[str, str]) -> Iterator[Callable[..., Served]]:
    """Starts servers on the tiny model, with more flags where they are given."""
    command = [*PROGRAM, "serve", *MODEL, "--port", "0", "--log-level", "warning"]
    command += ["--served-model-name", "tiny"]
    processes: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> Served:
        argv = [*command, *flags]
        process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return Served(process)

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def server(serve: Callable[..., Served]) -> Served:
    """One server for all tests that leave it as they found it."""
    return serve()
