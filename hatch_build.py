"""Builds the native CPU kernels with the package, where there is a C++ compiler.

The kernels are compiled once per instruction set; the library chooses among them when it is
loaded. Without a compiler, or where compiling fails, the package is built without them.

CXX names the compiler and CXXFLAGS adds flags. `python hatch_build.py FOLDER` builds the
library alone, against the jaxlib that is installed.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("kernels/llmjax_kernels/native")
LIBRARY = "libllmjax_native.so"
# An XLA takes calls built with headers as old as itself or older: those of the oldest supported.
HEADERS = "jaxlib>=0.10.0,<0.11; python_version<'3.15'"

FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-Wall", "-Wextra"),
    # Vectors wider than the instruction set's are passed between functions of one file only;
    # GCC's own vector headers read what they leave undefined.
    *("-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
    "-Wno-unknown-warning-option",
    # A row's result must not depend on how a loop was unrolled: a product and a sum are fused
    # where the code says so, nowhere else.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
]
INSTRUCTION_SETS = {
    "x86_64": {
        "generic": [],
        "avx2": ["-march=x86-64-v3"],
        "avx512": ["-march=x86-64-v4", "-mavx512vnni"],
        "amx": ["-march=x86-64-v4", "-mavx512vnni", "-mamx-tile", "-mamx-int8"],
    }
}
# Left out where the compiler, or its assembler, does not know them: an instruction of each.
OPTIONAL = {"amx": 'void f() { asm("tdpbssd %tmm0, %tmm1, %tmm2"); }'}


class NativeKernels(BuildHookInterface):
    """Puts the library beside its Python module, and into the wheel."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return [HEADERS] if self.target_name == "wheel" and compiler() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        library = NATIVE / LIBRARY
        try:
            built = build(Path(self.root), Path(self.root, "build/native"))
        except (OSError, RuntimeError) as error:
            Path(self.root, library).unlink(missing_ok=True)
            self.app.display_warning(
                f"the native CPU kernels are left out, and XLA serves in their place, several "
                f"times slower: {error}"
            )
            return
        built.replace(Path(self.root, library))  # a process may have the old one loaded
        build_data["artifacts"].append(library.as_posix())
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def compiler() -> list[str] | None:
    """The C++ compiler's command; None where there is none."""
    if os.name != "posix":
        return None
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def build(root: Path, folder: Path) -> Path:
    """The library, compiled into `folder`; what has not changed is not compiled again.

    Raises:
        RuntimeError: there is no compiler, there are no headers, or the compiler failed.
    """
    command = compiler()
    if command is None:
        raise RuntimeError("no C++ compiler was found (CXX, c++, g++, clang++)")
    headers = _headers()
    target = _run([*command, "-dumpmachine"]).strip()
    command += [*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    sources = root / NATIVE / "src"
    contents = hashlib.sha256(target.encode())
    for path in [*sorted(sources.iterdir()), *sorted(headers.glob("xla/ffi/api/*.h"))]:
        contents.update(path.read_bytes())
    folder.mkdir(parents=True, exist_ok=True)

    def compiled(unit: tuple[str, list[str]]) -> Path:
        source, flags = unit
        name = hashlib.sha256(shlex.join([*command, source, *flags]).encode() + contents.digest())
        made = folder / f"{name.hexdigest()[:16]}.o"
        if not made.exists():
            partial = made.with_suffix(".part")
            paths = ["-isystem", str(headers), "-c", str(sources / source), "-o", str(partial)]
            _run([*command, *flags, *paths])
            partial.replace(made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compiled, _units(sources, _instruction_sets(command, target))))
    for old in set(folder.glob("*.o")) - set(objects):
        old.unlink()
    library = folder / LIBRARY
    exports = (
        "-Wl,-exported_symbol,_llmjax_*"
        if "apple" in target
        else f"-Wl,--version-script={sources / 'exports.map'}"
    )
    _run([*command, "-shared", exports, *map(str, objects), "-o", str(library)])
    return library


def _instruction_sets(command: list[str], target: str) -> dict[str, list[str]]:
    """Those to compile for and their flags."""
    sets = INSTRUCTION_SETS.get(target.split("-")[0], {"generic": []})
    return {
        isa: flags
        for isa, flags in sets.items()
        if isa not in OPTIONAL or ("linux" in target and _compiles(command + flags, OPTIONAL[isa]))
    }


def _compiles(command: list[str], source: str) -> bool:
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "-x", "c++", "-c", "-", "-o", f"{folder}/made.o"],
            input=source,
            capture_output=True,
            text=True,
        )
    return done.returncode == 0


def _units(sources: Path, sets: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    """What to compile, and the flags of each; the slowest first."""
    kernels = [("kernels.cc", [*flags, f"-DLLMJAX_ISA={isa}"]) for isa, flags in sets.items()]
    digest = runpy.run_path(str(sources.parent / "sources.py"))["digest"](sources)
    flags = {"sources.cc": [f'-DLLMJAX_SOURCES="{digest}"']}
    others = [path.name for path in sorted(sources.glob("*.cc")) if path.name != "kernels.cc"]
    has = [f"-DLLMJAX_HAS_{isa}" for isa in sets if isa in OPTIONAL]
    return kernels[::-1] + [(name, [*has, *flags.get(name, [])]) for name in others]


def _headers() -> Path:
    jaxlib = find_spec("jaxlib")
    if jaxlib is None or jaxlib.origin is None:
        raise RuntimeError("jaxlib, whose headers they need, is not there")
    return Path(jaxlib.origin).parent / "include"


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"`{shlex.join(command)}` failed:\n{error.stderr}") from None
    sys.stderr.write(done.stderr)
    return done.stdout


if __name__ == "__main__":
    print(build(Path(__file__).parent, Path(sys.argv[1])))
