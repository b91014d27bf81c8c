"""Whatever schemathesis makes of /openapi.json is answered as that says, and breaks nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .conftest import KEY

CONFIG = Path(__file__).with_name("schemathesis.toml")
PROGRAM = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed here")
def test_no_request_that_is_described_breaks_the_server(serve, tmp_path):
    """CONTRIBUTING.md has the command for more of it."""
    server = serve("--max-model-len", "128", "--files-dir", str(tmp_path / "files"))
    args = [f"--config-file={CONFIG}", "run", f"{server.url}/openapi.json", "--no-color"]
    args += ["--phases", "fuzzing", "-n", "12", "--seed", "1", "--warnings", "off"]
    args += ["-H", f"Authorization: Bearer {KEY}"]
    done = subprocess.run(
        [*PROGRAM, *args], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert server.call("/health") == (200, {"status": "ok"})
