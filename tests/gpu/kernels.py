"""Kernels as machine code: what ptxas says of those that jax-triton and Mosaic GPU made."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import triton
from aot import compile_for
from jax.sharding import Mesh
from targets import BLOCK_OVERHEAD, REGISTERS, THREADS, Target

from llmjax_kernels.kv_format import KV_FORMATS
from llmjax_kernels.layout import PagedKV, make_ragged_batch
from llmjax_kernels.paged_attention import AttentionSpec, paged_attention

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
PAGES, PAGE_SIZE, TABLE = 4096, 16, 512


class Compiled(Protocol):
    """What kernels are compiled for."""

    def compile(self, target: Target, mesh: Mesh) -> Any: ...


@dataclass(frozen=True)
class Case:
    """One layer's attention in one bucket (T, S).

    Attributes:
        kernels: LLMJAX_KERNELS.
    """

    kernels: str = ""
    tokens: int = 8
    seqs: int = 8
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    kv: str = "bfloat16"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def compile(self, target: Target, mesh: Mesh, *, donate: bool = True) -> Any:
        shape = jax.ShapeDtypeStruct
        ints = partial(shape, dtype=jnp.int32)
        T, S, format = self.tokens, self.seqs, KV_FORMATS[self.kv]
        q = shape((T, self.heads, self.head_dim), self.dtype)
        k = shape((T, self.kv_heads, self.head_dim), self.dtype)
        row = (self.kv_heads, format.width(self.head_dim))
        pages = shape((PAGES, PAGE_SIZE, *row), format.storage)

        def attention(q, k, v, kv, starts, lens, tables, sinks):
            batch = make_ragged_batch(starts, lens, tables, T, decode_only=T == S)
            spec = AttentionSpec(self.head_dim**-0.5, self.window, self.softcap)
            return paged_attention(q, k, v, kv, batch, spec, sinks)

        sinks = shape((self.heads,), self.dtype) if self.sinks else None
        rest = (ints((S + 1,)), ints((S,)), ints((S, TABLE)), sinks)
        shapes = (q, k, k, PagedKV(pages, pages, format), *rest)
        os.environ["LLMJAX_KERNELS"] = self.kernels
        return compile_for(target, mesh, attention, *shapes, donate=(3,) if donate else ())


def both(name: str, **options: object) -> dict[str, Case]:
    """A case that decodes, and one of prompts and decodes."""
    return {
        f"{name} decode": Case(**options),  # type: ignore[arg-type]
        f"{name} mixed": Case(tokens=2048, **options),  # type: ignore[arg-type]
    }


CASES = {
    **both("head 128"),
    "head 128 decode, Triton's": Case(kernels="triton"),
    "decode of one": Case(tokens=1, seqs=1),
    "mixed of few": Case(tokens=32, seqs=8),
    **both("head 64, group 7", head_dim=64, heads=56),
    **both("head 80, no groups", head_dim=80, heads=8),
    **both("head 96, group 3, float16", head_dim=96, heads=24, dtype="float16", kv="float16"),
    **both("head 256, window, softcap", head_dim=256, heads=16, window=4096, softcap=50.0),
    **both("head 64, group 8, window, sinks", head_dim=64, heads=64, window=128, sinks=True),
    **both("pages of int8", kv="int8"),
    **both("pages of e4m3", kv="fp8_e4m3"),
    **both("pages of e5m2, head 256", kv="fp8_e5m2", head_dim=256, heads=16),
    **both("float32", dtype="float32", kv="float32"),
    **both("float32, head 256, group 32", dtype="float32", kv="float32", head_dim=256, kv_heads=1),
    **both("group 71, head 64", heads=71, kv_heads=1, head_dim=64),
    "head 128 mixed, Mosaic GPU's": Case(kernels="mosaic", tokens=2048),
    "head 128 mixed, window, softcap, float16, Mosaic GPU's": Case(
        kernels="mosaic",
        tokens=2048,
        window=4096,
        softcap=50.0,
        sinks=True,
        dtype="float16",
        kv="float16",
    ),
    "head 64 mixed, group 7, Mosaic GPU's": Case(
        kernels="mosaic", tokens=2048, head_dim=64, heads=56
    ),
}


@dataclass(frozen=True)
class MachineCode:
    """Attributes:
    spilled: bytes of registers kept in memory, stored and loaded.
    shared: bytes of shared memory of a block.
    blocks: that a multiprocessor holds at once.
    products, copies: by wgmma and by TMA, as often as they stand there; of Mosaic GPU's.
    """

    kernel: str
    threads: int
    registers: int
    spilled: int
    shared: int
    blocks: int
    products: int = 0
    copies: int = 0

    def fits(self, target: Target) -> bool:
        """Nothing is spilled, and a multiprocessor has room for it."""
        return self.spilled == 0 and self.shared <= target.shared_of_block and self.blocks > 0

    def __str__(self) -> str:
        return (
            f"{self.kernel}: {self.registers} registers, {self.spilled} bytes spilled, "
            f"{self.shared / 1024:.0f} KiB shared, {self.threads} threads, {self.blocks} blocks "
            f"({100 * self.blocks * self.threads // THREADS}%)"
        )


def machine_code(target: Target, mesh: Mesh, case: Compiled, dumps: Path) -> Iterator[MachineCode]:
    """Of the kernels of one case that no earlier case had.

    Args:
        dumps: where jax-triton and Mosaic GPU write what they compile, in folders of these names.
    """

    def ptx() -> set[Path]:
        return {*dumps.glob("triton/*/*.ptx"), *dumps.glob("mosaic/*.ptx")}

    known = ptx()
    case.compile(target, mesh)
    for path in sorted(ptx() - known):
        yield (of_mosaic if path.parent.name == "mosaic" else assemble)(target, path)


def of_mosaic(target: Target, ptx: Path) -> MachineCode:
    """What ptxas made of a kernel of Mosaic GPU when that was compiled."""
    launch = ptx.with_suffix(".before_layout_inference.txt").read_text()
    shared = int(re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", launch)[0])
    threads = int(re.findall(r"\.maxntid (\d+)", ptx.read_text())[0])
    code = measure(target, ptx.stem, ptx.with_suffix(".ptxas").read_text(), threads, shared)
    products, copies = (
        ptx.read_text().count(x) for x in ("wgmma.mma_async", "cp.async.bulk.tensor")
    )
    return replace(code, products=products, copies=copies)


def assemble(target: Target, ptx: Path) -> MachineCode:
    """What ptxas makes of a kernel of Triton.

    Raises:
        RuntimeError: nothing; carries what it said.
    """
    command = [PTXAS, f"-arch={target.arch}", "-v", ptx, "-o", ptx.with_suffix(".cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    info = ptx.with_suffix(".compile_info").read_text()
    shared = int(re.findall(r"shared_mem_bytes: (\d+)", info)[0])
    threads = int(re.findall(r"\.reqntid (\d+)", ptx.read_text())[0])
    return measure(target, ptx.stem, done.stderr, threads, shared)


def measure(target: Target, name: str, report: str, threads: int, shared: int) -> MachineCode:
    """Of what ptxas says of a kernel."""
    registers = int(re.findall(r"Used (\d+) registers", report)[0])
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    blocks = min(
        # Registers are handed out to warps, 256 at a time.
        REGISTERS // (-(-registers * 32 // 256) * 256 * threads // 32),
        target.shared // (shared + BLOCK_OVERHEAD),
        THREADS // threads,
    )
    return MachineCode(name, threads, registers, spilled, shared, blocks)
