"""Runs a script of this folder on virtual devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
_QUICK = "--xla_backend_optimization_level=0"
"""A program that runs for a moment needs no effort in compiling."""


def on_virtual_devices(script: str, *arguments: Any, devices: int = 8) -> Any:
    """What the script prints, as JSON, which its arguments are too; the last line of it."""
    done = subprocess.run(
        [sys.executable, HERE / script, *map(json.dumps, arguments)],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in (".", "kernels", "serving")),
            "JAX_PLATFORMS": "cpu",
            "LLMJAX_KERNELS": "xla",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {_QUICK}",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
