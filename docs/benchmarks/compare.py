"""llmjax beside llama.cpp and vLLM on this CPU: `make bench-compare` runs it.

Both sides of every comparison are measured in one run, in turn, round by round. A side is a
process that stays loaded; while another one is measured it is stopped (SIGSTOP), so that no
two ever run together. The results go to cpu.json, which report.py turns into cpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import report
from sides.worker import HEAD_START, PROMPT_LEN

ROOT = Path(__file__).parents[2]
SIDES = Path(__file__).parent / "sides"
OURS, LLAMACPP, VLLM, TRANSFORMERS = report.SIDES
VLLM_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
READY_SECONDS = 600
CHAT = ["--endpoint", "/v1/chat/completions", "--max-concurrency", "32"]
CHAT += ["--num-prompts", "64", "--input-len", "128", "--output-len", "64"]
SLOT_TOKENS = 512
"""Context of a chat on llama.cpp's server, which shares it out beforehand."""


def decode(streams: int, steps: int) -> dict[str, int]:
    context = PROMPT_LEN + HEAD_START + steps // 2  # in the middle of the steps that count
    return {"decode": streams, "steps": steps, "context": context}


# The more streams, the fewer steps make a run that is long enough.
DECODE = [decode(1, 64), decode(4, 64), decode(16, 32), decode(32, 32), decode(64, 24)]
PREFILL = {"prefill": 512}
CASES = {
    "smollm2-135m-instruct": [*DECODE, PREFILL],
    "gemma-3-270m": [DECODE[0], DECODE[2], PREFILL],
    "qwen2.5-coder-0.5b-instruct": [DECODE[0], DECODE[2], PREFILL],
}
FIRST = "smollm2-135m-instruct"
"""The model of the HTTP table, of vLLM and of transformers."""

WITHOUT_AMX = {"LLMJAX_ISA": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""By oneDNN vLLM and transformers multiply; llama.cpp is built without (see the Makefile)."""


@dataclass
class Side:
    """A process that is stopped but while it is asked something.

    Attributes:
        about: what it said of itself once it had loaded.
    """

    name: str
    command: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self.command,
            env={**os.environ, **self.env},
            stdin=subprocess.PIPE,
            stdout=self._stdout(),
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._wait_until_ready()
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *error: object) -> None:
        # What it has started, and holds its memory, is of its process group.
        for number in (signal.SIGTERM, signal.SIGCONT):
            self._signal(number)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    @contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def ask(self, case: dict[str, int]) -> float:
        """Seconds that the case took."""
        assert self._process.stdin is not None
        with self.awake():
            self._process.stdin.write(json.dumps(case) + "\n")
            self._process.stdin.flush()
            return json.loads(self._line())

    def _stdout(self) -> Any:
        return subprocess.PIPE

    def _wait_until_ready(self) -> None:
        self.about = json.loads(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline() or self._fail("ended")

    def _fail(self, what: str) -> Any:
        self._log.seek(0)
        sys.exit(f"{self.name} {what}:\n{self._log.read()[-4000:]}")

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@dataclass
class Server(Side):
    """A server under `llmjax bench serve`, a process of its own beside it."""

    port: int = 0

    def _stdout(self) -> Any:
        return self._log

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                self._fail("ended")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        self._fail("was not ready in time")

    def load(self, seed: int) -> dict[str, Any]:
        """What `llmjax bench serve` reports; a server may remember the prompts of a seed."""
        command = [sys.executable, "-m", "llmjax_serving.cli", "bench", "serve", "--model", "m"]
        command += ["--base-url", f"http://127.0.0.1:{self.port}", *CHAT]
        command += ["--seed", str(seed)]
        with tempfile.NamedTemporaryFile(suffix=".json") as file, self.awake():
            command += ["--output-json", file.name]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{self.name}: {done.stderr}")
            return json.loads(Path(file.name).read_text())


def model_files() -> dict[str, Path]:
    """Of those models that can be had, fetched where they are not here yet."""
    sys.path.append(str(ROOT / "tests"))
    from test_real_models import QWEN

    from llmjax.checkpoint import CATALOGUE, pull
    from llmjax.errors import DownloadError

    CATALOGUE.setdefault(QWEN.name, QWEN)
    files = {}
    for name in CASES:
        try:
            files[name] = pull(name)
        except DownloadError as error:
            print(f"{name} is left out: {error}")
    return files


def in_process_sides(name: str, file: Path, args: argparse.Namespace) -> list[Side]:
    sides = [
        Side(OURS, [sys.executable, str(SIDES / "ours.py"), str(file)]),
        Side(LLAMACPP, [args.peers_python, str(SIDES / "llamacpp.py"), str(file)]),
    ]
    if args.vllm_python and name == FIRST:
        script, folder = str(SIDES / "vllm_offline.py"), vllm_folder(file, args)
        # On few cores a second process for its engine only costs.
        env = {**VLLM_ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        sides.append(Side(VLLM, [args.vllm_python, script, folder], env))
        script = str(SIDES / "transformers_generate.py")
        sides.append(Side(TRANSFORMERS, [args.vllm_python, script, folder], VLLM_ENV))
    return sides


def servers(file: Path, args: argparse.Namespace) -> list[Server]:
    port = args.port
    ours = [sys.executable, "-m", "llmjax_serving.cli", "serve", "--model", str(file)]
    ours += ["--served-model-name", "m", "--port", str(port), "--no-background"]
    theirs = [args.peers_python, str(SIDES / "llamacpp_server.py"), str(file), str(port + 1), "m"]
    theirs += ["32", str(SLOT_TOKENS)]
    made = [Server(OURS, ours, port=port), Server(LLAMACPP, theirs, port=port + 1)]
    if args.vllm_python:
        program = [args.vllm_python, "-m", "vllm.entrypoints.cli.main", "serve"]
        flags = ["--max-model-len", "1024", "--served-model-name", "m"]
        command = [*program, vllm_folder(file, args), *flags, "--port", str(port + 2)]
        made.append(Server(VLLM, command, VLLM_ENV, port=port + 2))
    return made


def vllm_folder(file: Path, args: argparse.Namespace) -> str:
    """The model as vLLM takes it: bfloat16 in safetensors."""
    folder = ROOT / "build" / "benchmarks" / f"{FIRST}-bfloat16"
    if not (folder / "config.json").exists():
        script = str(SIDES / "to_bfloat16.py")
        subprocess.run([args.vllm_python, script, str(file), str(folder)], check=True)
    return str(folder)


@contextmanager
def all_of(sides: Sequence[Side]) -> Iterator[None]:
    """Loads one after the other; each is stopped as soon as it is ready."""
    with ExitStack() as stack:
        for side in sides:
            stack.enter_context(side)
            print(f"  {side.name} is loaded", flush=True)
        yield


def measure_in_process(sides: Sequence[Side], cases: list[dict], rounds: int) -> dict[str, Any]:
    """Seconds by case and side, a number for each round after one that does not count."""
    with all_of(sides):
        runs = [{**case, "seconds": {side.name: [] for side in sides}} for case in cases]
        for number in range(rounds + 1):
            for case, run in zip(cases, runs, strict=True):
                for side in sides:
                    seconds = side.ask(case)
                    if number:
                        run["seconds"][side.name].append(seconds)
            print(f"  round {number} of {rounds}", flush=True)
        work = sides[0].about["work"]
    return {"work": work, "cases": runs, "about": {side.name: side.about for side in sides}}


def measure_servers(sides: Sequence[Server], rounds: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    with all_of(sides):
        for number in range(rounds):
            for side in sides:
                runs[side.name].append(side.load(seed=number))
            print(f"  round {number + 1} of {rounds}", flush=True)
    return runs


def version_of(python: str, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def measure_limits() -> dict[str, Any]:
    from llmjax.bench import roofline

    return asdict(roofline.measure())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="llmjax beside its peers on this CPU")
    parser.add_argument("--peers-python", required=True, help="has xllamacpp and llama_cpp")
    parser.add_argument("--vllm-python", help="has vLLM and transformers; by default left out")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement [5]")
    parser.add_argument("--port", type=int, default=8810, help="the first of three [8810]")
    parser.add_argument("--machine", default=platform.processor() or platform.machine())
    parser.add_argument(
        "--without-amx",
        action="store_true",
        help=f"nobody uses it, {FIRST} alone; into cpu-without-amx.md",
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.without_amx:
        os.environ |= WITHOUT_AMX
    files = model_files()
    if args.without_amx:
        files = {FIRST: files[FIRST]}
    results: dict[str, Any] = {"machine": args.machine, "rounds": args.rounds, "models": {}}
    results["versions"] = {"xllamacpp": version_of(args.peers_python, "xllamacpp")}
    print("limits")
    results["limits"] = measure_limits()
    for name, file in files.items():
        print(name)
        sides = in_process_sides(name, file, args)
        results["models"][name] = measure_in_process(sides, CASES[name], args.rounds)
    print("32 chats over HTTP")
    results["http"] = measure_servers(servers(files[FIRST], args), args.rounds)
    name = "cpu-without-amx" if args.without_amx else "cpu"
    Path(__file__).with_name(f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    report.write(name)


if __name__ == "__main__":
    main()
