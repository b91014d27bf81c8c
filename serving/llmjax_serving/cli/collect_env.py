"""Print what a bug report needs: versions, devices, CPU, memory."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmjax import __version__

PACKAGES = (
    *("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-triton", "numpy"),
    *("tokenizers", "gguf", "orbax-checkpoint", "huggingface-hub", "jinja2"),
    *("aiohttp", "prometheus-client"),
)
CPU_FEATURES = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
ENVIRONMENT = ("JAX_", "XLA_", "LLMJAX_", "CUDA_VISIBLE", "NVIDIA_VISIBLE", "HF_H", "OMP_NUM")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(args: argparse.Namespace) -> int:
    for name, value in collect():
        print(f"{name + ':':<24}{value}")
    return 0


def collect() -> Iterator[tuple[str, str]]:
    """(name, value) of everything, in the order of printing."""
    yield "llmjax", __version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", platform.platform()
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"
    yield from cpu()
    yield from devices()
    yield "kernels", kernels()
    for name, value in sorted(os.environ.items()):
        if name.startswith(ENVIRONMENT):
            secret = any(word in name for word in ("KEY", "TOKEN"))
            yield f"${name}", "(set)" if secret else value


def kernels() -> str:
    from llmjax_kernels import native
    from llmjax_kernels.paged_attention import serving

    return f"native ({native.instruction_set()})" if native.available() else serving()


def cpu() -> Iterator[tuple[str, str]]:
    import psutil

    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    yield "cpu", fields.get("model name") or platform.processor() or platform.machine()
    physical, logical = psutil.cpu_count(logical=False), psutil.cpu_count()
    yield "cpu cores", f"{physical} physical, {logical} logical"
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    yield "cpu features", " ".join(f for f in CPU_FEATURES if f in flags) or "unknown"
    memory = psutil.virtual_memory()
    yield "memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free"


def devices() -> Iterator[tuple[str, str]]:
    import jax

    try:
        found = jax.devices()
    except RuntimeError as error:
        yield "devices", f"none: {error}"
        return
    for device in found:
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        memory = f", {limit / 2**30:.1f} GiB" if limit else ""
        yield f"device {device.id}", f"{device.platform} {device.device_kind}{memory}"
