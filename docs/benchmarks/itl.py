"""Prompt tokens beside decodes, against the time between tokens.

    python docs/benchmarks/itl.py [MODEL]

Serves MODEL with each of SETTINGS in turn and loads it by `llmjax bench serve`: 32 chats at a
time, prompts of 128 tokens, answers of 64, ROUNDS times. Prints a table for
docs/benchmarks/itl.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median

SETTINGS = [
    ["--mixed-prefill-tokens", "32"],
    ["--mixed-prefill-tokens", "128"],
    ["--mixed-prefill-tokens", "512"],
    ["--target-itl-ms", "60"],
    ["--target-itl-ms", "100"],
]
ROUNDS, PORT, SECONDS = 3, 8830, 300
CLI = [sys.executable, "-m", "llmjax_serving.cli"]
LOAD = ["--max-concurrency", "32", "--num-prompts", "64", "--input-len", "128"]
LOAD += ["--output-len", "64", "--endpoint", "/v1/chat/completions"]
URL = f"http://127.0.0.1:{PORT}"


@contextmanager
def served(model: str, setting: list[str]) -> Iterator[None]:
    command = [*CLI, "serve", "--model", model, "--port", str(PORT), "--no-background"]
    process = subprocess.Popen([*command, *setting], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{URL}/health", timeout=5):
                    break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    sys.exit(f"the server with {' '.join(setting)} did not get ready")
                time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait()


def load(model: str, seed: int) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        flags = ["--model", model, "--base-url", URL, *LOAD, "--seed", str(seed)]
        command = [*CLI, "bench", "serve", *flags, "--output-json", file.name]
        subprocess.run(command, check=True, capture_output=True)
        return json.loads(Path(file.name).read_text())


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
    print("| | tokens/s | between tokens, p50 | p99 | first token, p50 | p99 |")
    print("| :-- | --: | --: | --: | --: | --: |")
    for setting in SETTINGS:
        with served(model, setting):
            load(model, ROUNDS)  # warm
            runs = [load(model, seed) for seed in range(ROUNDS)]
        speed = median(run["output_tokens_per_second"] for run in runs)
        cells = [f"`{' '.join(setting)}`", f"{speed:,.0f}"]
        shown = product(("itl_ms", "ttft_ms"), ("p50", "p99"))
        cells += [f"{median(run[what][share] for run in runs):,.0f} ms" for what, share in shown]
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
