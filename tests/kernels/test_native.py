"""Which kernels serve: what LLMJAX_KERNELS and the machine say."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from numpy.random import mtrand

from llmjax_kernels import native
from llmjax_kernels.native import sources

ORDER = ("amx", "avx512", "avx2", "generic")


def test_the_environment_decides(monkeypatch):
    for value, expected in [("", True), ("native", True), ("triton", True), ("xla", False)]:
        monkeypatch.setenv("LLMJAX_KERNELS", value)
        assert native.available() is expected
    monkeypatch.delenv("LLMJAX_KERNELS")
    assert native.available()


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("LLMJAX_KERNELS", "cuda")
    with pytest.raises(
        RuntimeError, match="LLMJAX_KERNELS is 'cuda', allowed: xla, triton, mosaic, native"
    ):
        native.available()


def test_another_instruction_set_is_refused(monkeypatch):
    monkeypatch.delenv("LLMJAX_KERNELS", raising=False)
    monkeypatch.setenv("LLMJAX_ISA", "sse9")
    with pytest.raises(
        RuntimeError, match="LLMJAX_ISA is 'sse9', allowed: amx, avx512, avx2, generic"
    ):
        native.available()


def test_other_devices_are_served_by_xla(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("LLMJAX_KERNELS", raising=False)
    assert not native.available()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "was not built"),
        (b"no library", "file too short|ELF"),
        (Path(mtrand.__file__).read_bytes(), "was built from other sources .*llmjax_isa"),
    ],
)
def test_without_the_library_xla_serves(monkeypatch, tmp_path, caplog, content, reason):
    path = tmp_path / "libllmjax_native.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(native, "_LIBRARY", path)
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    native._problem.cache_clear()
    try:
        monkeypatch.delenv("LLMJAX_KERNELS", raising=False)
        with caplog.at_level(logging.WARNING):
            assert not native.available()
            assert not native.available()
        [record] = caplog.records  # said once
        assert "XLA serves in their place" in record.getMessage()
        monkeypatch.setenv("LLMJAX_KERNELS", "native")
        with pytest.raises(RuntimeError, match=f"LLMJAX_KERNELS is native, but.*({reason})"):
            native.available()
    finally:
        native._problem.cache_clear()


class TestSources:
    """What the library was built from, beside what is there now."""

    @pytest.fixture
    def warnings(self, tmp_path, monkeypatch, caplog):
        """Changes a copy of the sources, and gives what the library's user is told then."""

        def after(change) -> list[str]:
            folder = tmp_path / "src"
            shutil.copytree(sources.SOURCES, folder)
            change(folder)
            monkeypatch.setattr(native, "digest", lambda: sources.digest(folder))
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                native._warn_of_other_sources(native.library().llmjax_sources().decode())
            return [record.getMessage() for record in caplog.records]

        return after

    def test_they_are_those_that_are_there(self):
        assert native.library().llmjax_sources().decode() == sources.digest()

    @pytest.mark.parametrize(
        "change",
        [
            lambda folder: (folder / "matmul.h").write_text("// another"),
            lambda folder: (folder / "matmul.h").rename(folder / "matmuls.h"),
            lambda folder: (folder / "added.h").touch(),
        ],
    )
    def test_others_are_told_in_one_line(self, warnings, change):
        [line] = warnings(change)
        assert "built from other sources: `pip install -e .`" in line

    def test_other_files_do_not_count(self, warnings):
        assert warnings(lambda folder: (folder / "matmul.h~").touch()) == []

    def test_an_install_without_sources_is_told_nothing(self, warnings):
        assert warnings(shutil.rmtree) == []


@pytest.mark.every_isa
def test_llmjax_isa_is_the_most_that_is_used():
    most = os.environ.get("LLMJAX_ISA", ORDER[0])
    assert native.instruction_set() in ORDER[ORDER.index(most) :]


@pytest.mark.parametrize("isa", ORDER[1:])
def test_each_instruction_set(isa):
    """The library is loaded once a process, so each set has one of its own."""
    command = [sys.executable, "-m", "pytest", "-m", "every_isa", os.path.dirname(__file__)]
    env = os.environ | {"LLMJAX_ISA": isa, "LLMJAX_KERNELS": "native"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


DIGEST = """
import hashlib, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from random_weights import QUANTISED, block_size, random_weight
from llmjax_kernels import native
from llmjax_kernels.native.blocks import Projection, Residual, linear, mlp_block
rng = np.random.default_rng(0)
for format in QUANTISED:
    for N, blocks, rows in [(1, 1, 32), (83, 5, 47), (96, 1, 17), (33, 7, 150), (64, 25, 48)]:
        K = blocks * max(block_size(format), 32)
        weights = [Projection(random_weight(format, N, K, rng)[0]) for _ in range(2)]
        down = Projection(random_weight("Q4_0", K, 64, rng)[0])
        x = rng.standard_normal((rows, K)).astype(np.float32)
        out = [linear(x, weights[0], np.array([rows], np.int32))]
        if N == 64:
            args = (*weights, down, "silu", Residual(), 1e-5, np.array([rows], np.int32))
            out.append(mlp_block(x, None, *args))
        data = b"".join(np.asarray(o).tobytes() for o in out)
        print(format, N, K, rows, hashlib.sha256(data).hexdigest())
print(native.instruction_set())
"""


def test_amx_gives_the_bits_of_avx512():
    def digests(isa: str) -> tuple[list[str], str]:
        command = [sys.executable, "-c", DIGEST, os.path.dirname(__file__)]
        env = os.environ | {"LLMJAX_ISA": isa, "LLMJAX_KERNELS": "native"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        *lines, used = done.stdout.splitlines()
        return lines, used

    amx, used = digests("amx")
    if used != "amx":
        pytest.skip("this machine has no AMX")
    assert (amx, "avx512") == digests("avx512")
