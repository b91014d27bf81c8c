"""The C++ kernels for CPUs, as XLA FFI calls; the library may be absent."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

import jax

log = logging.getLogger(__name__)

_LIBRARY = Path(__file__).parent / "libllmjax_native.so"
_TARGETS = ("attention_block", "mlp_block", "linear", "embed")


def available() -> bool:
    """Whether the native kernels can be used: a CPU, built, and not forbidden.

    `LLMJAX_KERNELS` is "xla" to forbid them, "native" to insist on them.

    Raises:
        RuntimeError: they are insisted on and cannot be had; or the variable is neither.
    """
    wanted = os.environ.get("LLMJAX_KERNELS", "")
    if wanted not in ("", "xla", "native"):
        raise RuntimeError(f"LLMJAX_KERNELS is {wanted!r}, allowed: xla, native")
    if wanted == "xla" or jax.default_backend() != "cpu":
        return False
    problem = _problem()
    if problem and wanted == "native":
        raise RuntimeError(f"LLMJAX_KERNELS is native, but {problem}")
    return problem is None


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library, its calls registered with XLA.

    Raises:
        OSError: it is not there or cannot be loaded.
    """
    lib = ctypes.CDLL(str(_LIBRARY))
    lib.llmjax_isa.restype = ctypes.c_char_p
    lib.llmjax_greatest_scale.restype = ctypes.c_float
    for name in _TARGETS:
        handler = jax.ffi.pycapsule(getattr(lib, f"llmjax_{name}"))
        jax.ffi.register_ffi_target(f"llmjax_{name}", handler, platform="cpu")
    return lib


def instruction_set() -> str:
    """Which of the compiled variants runs here: amx, avx512, avx2 or generic."""
    return library().llmjax_isa().decode()


def set_threads(threads: int) -> None:
    """Threads that work on one call; 0 is one a core."""
    library().llmjax_set_threads(threads)


@functools.cache
def _problem() -> str | None:
    """Why the library cannot be used, said once in the log."""
    try:
        library()
    except OSError as error:
        what = "was not built (no C++ compiler?)" if not _LIBRARY.exists() else str(error)
        log.warning(
            "the native CPU kernels are missing: %s; XLA serves in their place, several times "
            "slower, with weights expanded to float32",
            what,
        )
        return f"the native library {what}"
    return None
