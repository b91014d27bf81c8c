"""Kernels in Triton, run by its interpreter, as a backend of an operation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from llmjax_kernels import triton_call
from llmjax_kernels.gpu import Gpu, compiling_for

GPU = Gpu(compute_capability=90, multiprocessors=132)


def triton_backend(
    monkeypatch: pytest.MonkeyPatch, backend: ModuleType, make_args: Callable[..., Any]
) -> Callable[..., Any]:
    """`backend.run(make_args(...))`, interpreted; the test is skipped where Triton is not."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton, whose interpreter runs the kernels, is not installed")
    import interpreter

    monkeypatch.setattr(backend, "launch", interpreter.launch)
    monkeypatch.setattr(triton_call, "installed", lambda: True)
    monkeypatch.delenv("LLMJAX_KERNELS", raising=False)

    def run(*args: Any) -> Any:
        with compiling_for(GPU):
            assert backend.supports(make_args(*args))
            return backend.run(make_args(*args))

    return run
