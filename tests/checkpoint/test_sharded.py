"""Parameters go straight to their shards of an eight-device mesh."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from tiny_files import TINY_TOKENIZER, parameters, write_folder, write_gguf

from llmjax.checkpoint import convert

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SPLIT = ("embed", "head", "attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")


def run(script: str, *arguments: object, **env: str) -> dict:
    """A script's JSON answer from a fresh interpreter."""
    path = os.pathsep.join(str(ROOT / p) for p in (".", "kernels", "serving"))
    done = subprocess.run(
        [sys.executable, HERE / script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "orbax"])
def test_each_device_holds_its_part(tmp_path, tiny_model, kind):
    source = write_folder(tmp_path / "source")
    for name in TINY_TOKENIZER:
        (source / name).write_bytes((tiny_model / name).read_bytes())
    if kind == "gguf":
        source = write_gguf(tmp_path / "m.gguf")
    if kind == "orbax":
        source = convert(source, tmp_path / "out", progress=False)
    eight = "--xla_force_host_platform_device_count=8"
    found = run("load_sharded.py", source, "bfloat16", XLA_FLAGS=eight)
    assert found.keys() == parameters().keys()
    for path, value in parameters().items():
        expected = value if "norm" in path else value.astype(jnp.bfloat16)
        digest = hashlib.sha256(expected.tobytes()).hexdigest()
        is_split = path.removesuffix(".weight").endswith(SPLIT)
        assert found[path] == {"shards": 8 if is_split else 1, "devices": 8, "sha256": digest}, path
