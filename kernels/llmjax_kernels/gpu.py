"""The NVIDIA GPU that kernels are made for: the one that is here, or one that is not."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax


class Gpu(NamedTuple):
    """What a kernel's shape depends on.

    Attributes:
        compute_capability: 90 for 9.0.
        multiprocessors: that work side by side.
        kind: the device's name ("NVIDIA H100 80GB HBM3"), by which measurements are kept; empty
            for rules alone.
    """

    compute_capability: int
    multiprocessors: int
    kind: str = ""


_compiling_for: ContextVar[Gpu | None] = ContextVar("compiling_for", default=None)


@contextmanager
def compiling_for(gpu: Gpu) -> Iterator[None]:
    """Kernels that are traced inside are made for `gpu`, whether it is here or not."""
    token = _compiling_for.set(gpu)
    try:
        yield
    finally:
        _compiling_for.reset(token)


def target() -> Gpu | None:
    """What kernels are made for; None where programs run on something else."""
    return _compiling_for.get() or _present()


@functools.cache
def _present() -> Gpu | None:
    if jax.default_backend() != "gpu":
        return None
    device = jax.devices()[0]
    # An AMD GPU's is a name ("gfx942").
    capability = str(getattr(device, "compute_capability", ""))
    if not re.fullmatch(r"\d+\.\d+", capability):
        return None
    return Gpu(int(capability.replace(".", "")), device.core_count, device.device_kind)
