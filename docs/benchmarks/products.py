"""Products with float weights: the native kernels beside XLA's dot.

`python docs/benchmarks/products.py` prints the milliseconds of rows times a matrix, (M, 4096) x
(4096, 4096) and SmolLM2's down projection, in both, in turn; medians. For cpu.md.
"""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from llmjax_kernels import native
from llmjax_kernels.native.blocks import Projection, linear
from llmjax_kernels.packed import pack_float

SHAPES = ((4096, 4096), (576, 1536))
ROWS = (1, 4, 16, 64, 512)
SECONDS = 1.0
"""For each, at least; and at least 5 runs."""


def medians(calls) -> list[float]:
    """Milliseconds of each program with its inputs, run in turn."""
    took: list[list[float]] = [[] for _ in calls]
    programs = [(jax.jit(f).lower(*inputs).compile(), inputs) for f, *inputs in calls]
    for program, inputs in programs:
        program(*inputs).block_until_ready()
    end = time.perf_counter() + SECONDS * len(calls)
    while time.perf_counter() < end or len(took[0]) < 5:
        for (program, inputs), times in zip(programs, took, strict=True):
            began = time.perf_counter()
            program(*inputs).block_until_ready()
            times.append(time.perf_counter() - began)
    return [1e3 * statistics.median(times) for times in took]


def main() -> None:
    native.library()
    rng = np.random.default_rng(0)
    print("| weights | N x K | M | native, ms | XLA, ms | ratio |")
    print("| --- | --- | --: | --: | --: | --: |")
    for dtype in (np.float32, ml_dtypes.bfloat16):
        for N, K in SHAPES:
            weight = rng.standard_normal((N, K), np.float32).astype(dtype)
            packed, dense = Projection(pack_float(weight)), jnp.asarray(weight.T)
            for M in ROWS:
                x = jnp.asarray(rng.standard_normal((M, K), np.float32))
                rows = jnp.full(1, M, jnp.int32)
                mine, other = medians(
                    [(linear, x, packed, rows), (jnp.dot, x.astype(dtype), dense)]
                )
                print(
                    f"| {np.dtype(dtype).name} | {N} x {K} | {M} | {mine:.3f} | {other:.3f} "
                    f"| {other / mine:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
