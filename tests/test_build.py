"""What an install is made of, with a C++ compiler and without."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "kernels/llmjax_kernels/native/src"
FILES = ("pyproject.toml", "hatch_build.py", ".gitignore", "README.md", "LICENSE", "CHANGELOG.md")
LIBRARY = "llmjax_kernels/native/libllmjax_native.so"
LEFT_OUT = "the native CPU kernels are left out, and XLA serves in their place"


@pytest.fixture
def build(tmp_path):
    """Builds a copy of the project; the archive, and what was said."""
    pytest.importorskip("hatchling")
    project = tmp_path / "project"
    project.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, project)
    for folder in ("llmjax", "kernels", "serving"):
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / folder, project / folder, ignore=ignore)
    # A library from before must not come along, and what is compiled already need not be again.
    (project / "kernels" / LIBRARY).write_bytes(b"old")
    if (ROOT / "build/native").exists():
        shutil.copytree(ROOT / "build/native", project / "build/native")

    def run(target: str, **env: str) -> tuple[Path, str]:
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(tmp_path)]
        done = subprocess.run(
            command, cwd=project, env=os.environ | env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        [archive] = [path for path in tmp_path.iterdir() if path.is_file()]
        return archive, done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"CXX": "no-such-compiler"}, "no-such-compiler"),
        ({"CXX": "false"}, "`false -dumpmachine` failed"),
        ({"PATH": ""}, r"no C++ compiler was found (CXX, c++, g++, clang++)"),
        ({"CXXFLAGS": "-fno-such-flag"}, "-fno-such-flag"),
    ],
)
def test_a_wheel_without_a_working_compiler(build, env, reason):
    wheel, said = build("wheel", **env)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert said.count(LEFT_OUT) == 1
    assert reason in said
    names = zipfile.ZipFile(wheel).namelist()
    assert "llmjax_kernels/native/__init__.py" in names
    page = {f"llmjax_serving/web/dashboard.{ending}" for ending in ("html", "css", "js")}
    assert page <= set(names)
    assert LIBRARY not in names


@pytest.mark.skipif(
    not (ROOT / "kernels" / LIBRARY).exists(), reason="the native kernels are not built here"
)
def test_a_wheel_with_the_native_kernels(build, tmp_path):
    wheel, said = build("wheel")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    assert LEFT_OUT not in said
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "native/src" in name]
        library = ctypes.CDLL(archive.extract(LIBRARY, tmp_path / "wheel"))
    library.llmjax_isa.restype = ctypes.c_char_p
    assert library.llmjax_isa() in (b"amx", b"avx512", b"avx2", b"generic")
    assert not hasattr(library, "_Z11BestKernelsv")  # only what is called from outside is seen


def test_a_source_distribution_can_build_them(build):
    archive, _ = build("sdist")
    with tarfile.open(archive) as files:
        names = {name.split("/", 1)[1] for name in files.getnames()}
    sources = {f"kernels/llmjax_kernels/native/src/{path.name}" for path in SOURCES.iterdir()}
    assert sources | {"hatch_build.py", "pyproject.toml"} <= names
    assert not [name for name in names if name.endswith(".so")]


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(monkeypatch):
    pytest.importorskip("hatchling")
    monkeypatch.syspath_prepend(ROOT)
    import hatch_build

    def sets(*compiler: str, target: str = "x86_64-linux-gnu") -> list[str]:
        return list(hatch_build._instruction_sets([*compiler], target))

    known = ["generic", "avx2", "avx512"]
    assert sets("false") == known
    assert sets("true") == [*known, "amx"]
    assert sets("true", target="x86_64-apple-darwin") == known
    assert sets("true", target="aarch64-linux-gnu") == ["generic"]
