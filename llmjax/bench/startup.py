"""How long a server takes from its start to its first answer, and what the time goes to."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.request
from dataclasses import dataclass, field

from ..errors import LlmjaxError

_MILESTONES = (
    ("weights loaded", re.compile(r"KV pool")),
    ("first program compiled", re.compile(r"compiled Bucket")),
    ("ready", re.compile(r"^Ready: (?P<url>\S+)")),
)


@dataclass
class Startup:
    """Seconds since the process was started, by milestone, in the order they were passed."""

    milestones: dict[str, float] = field(default_factory=dict)

    def table(self) -> str:
        lines = [f"{'':<26}{'seconds':>9}{'step':>9}"]
        before = 0.0
        for name, at in self.milestones.items():
            lines.append(f"{name:<26}{at:>9.1f}{at - before:>9.1f}")
            before = at
        return "\n".join(lines)


def measure(command: list[str], *, timeout: float = 600) -> Startup:
    """Runs a `llmjax serve` command until it has answered one request, then stops it.

    Raises:
        LlmjaxError: the server ended, or did not answer in time.
    """
    result = Startup()
    url: list[str] = []
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            for name, pattern in _MILESTONES:
                match = pattern.search(line)
                if match and name not in result.milestones:
                    result.milestones[name] = time.perf_counter() - start
                    url.extend(match.groupdict().values())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while not url:
            if process.poll() is not None:
                raise LlmjaxError(f"the server ended with status {process.returncode}")
            if time.perf_counter() - start > timeout:
                raise LlmjaxError(f"the server was not ready within {timeout:.0f} s")
            time.sleep(0.02)
        body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{url[0]}/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=timeout).read()
        result.milestones["first answer (8 tokens)"] = time.perf_counter() - start
    finally:
        process.terminate()
        process.wait(30)
        reader.join(5)
    return result
