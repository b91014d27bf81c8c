"""The C++ kernels for CPUs, as XLA FFI calls; the library may be absent."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

import jax

from ..choice import wanted
from .sources import digest

log = logging.getLogger(__name__)

_LIBRARY = Path(__file__).parent / "libllmjax_native.so"
_REBUILD = "`pip install -e .` builds them again"
_INSTRUCTION_SETS = ("amx", "avx512", "avx2", "generic")
_TARGETS = ("attention_block", "mlp_block", "linear", "embed", "zeros")


def available() -> bool:
    """Whether the native kernels can be used: a CPU, built, and not forbidden.

    `LLMJAX_KERNELS` is "xla" to forbid them, "native" to insist on them.

    Raises:
        RuntimeError: they are insisted on and cannot be had; or that variable, or `LLMJAX_ISA`, has
            a value that means nothing.
    """
    choice, backend = wanted(), jax.default_backend()
    if choice == "native" and backend != "cpu":
        raise RuntimeError(f"LLMJAX_KERNELS is native, but jax runs on {backend}")
    if choice == "xla" or backend != "cpu":
        return False
    most = os.environ.get("LLMJAX_ISA", "")
    if most and most not in _INSTRUCTION_SETS:
        allowed = ", ".join(_INSTRUCTION_SETS)
        raise RuntimeError(f"LLMJAX_ISA is {most!r}, allowed: {allowed}")
    problem = _problem()
    if problem and choice == "native":
        raise RuntimeError(f"LLMJAX_KERNELS is native, but {problem}")
    return problem is None


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library, its calls registered with XLA.

    Raises:
        OSError: it is not there, cannot be loaded, or lacks what is called here.
    """
    lib = ctypes.CDLL(str(_LIBRARY))
    try:
        lib.llmjax_isa.restype = ctypes.c_char_p
        lib.llmjax_sources.restype = ctypes.c_char_p
        lib.llmjax_greatest_scale.restype = ctypes.c_float
        lib.llmjax_greatest_magnitude.restype = ctypes.c_float
        lib.llmjax_quantise_gguf.restype = ctypes.c_bool
        handlers = {name: getattr(lib, f"llmjax_{name}") for name in _TARGETS}
    except AttributeError as error:
        raise OSError(f"was built from other sources ({error}): {_REBUILD}") from None
    for name, handler in handlers.items():
        capsule = jax.ffi.pycapsule(handler)
        jax.ffi.register_ffi_target(f"llmjax_{name}", capsule, platform="cpu")
    _warn_of_other_sources(lib.llmjax_sources().decode())
    return lib


def instruction_set() -> str:
    """Which of the compiled variants runs here: amx, avx512, avx2 or generic."""
    return library().llmjax_isa().decode()


def set_threads(threads: int) -> None:
    """Threads that work on one call; 0 is one a core."""
    library().llmjax_set_threads(threads)


def _warn_of_other_sources(built_from: str) -> None:
    """Where the sources are there, as in an editable install, and have changed since."""
    if digest() not in (None, built_from):
        log.warning("the native CPU kernels were built from other sources: %s", _REBUILD)


@functools.cache
def _problem() -> str | None:
    """Why the library cannot be used, said once in the log."""
    try:
        library()
    except OSError as error:
        absent = "it was not built when llmjax was installed (no C++ compiler?)"
        what = str(error) if _LIBRARY.exists() else absent
        log.warning(
            "the native CPU kernels cannot be used: %s; XLA serves in their place, several times "
            "slower, with weights expanded to float32",
            what,
        )
        return f"their library cannot be used: {what}"
    return None
