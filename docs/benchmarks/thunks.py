"""What XLA takes for each thing that a compiled CPU program does, beside the work itself.

`python docs/benchmarks/thunks.py` prints the microseconds of a program's call, of a native
call that has next to nothing to do, and of the small fusion that may come between two: from
chains of two lengths, the least of many runs. For cpu.md.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

from llmjax_kernels import native
from llmjax_kernels.native.blocks import Projection, linear
from llmjax_kernels.packed import pack_float

SHORT, LONG, RUNS = 100, 500, 400


def seconds(link, count: int, x: jax.Array) -> float:
    """The least that a chain of `count` links took."""

    def chain(x):
        for _ in range(count):
            x = link(x)
        return x

    program = jax.jit(chain).lower(x).compile()
    least = float("inf")
    for _ in range(RUNS):
        began = time.perf_counter()
        program(x).block_until_ready()
        least = min(least, time.perf_counter() - began)
    return least


def cost(link, x: jax.Array) -> tuple[float, float]:
    """Microseconds of a link, and of a program with none."""
    short, long = seconds(link, SHORT, x), seconds(link, LONG, x)
    each = (long - short) / (LONG - SHORT)
    return 1e6 * each, 1e6 * (short - SHORT * each)


def main() -> None:
    native.library()
    native.set_threads(1)
    weight = Projection(pack_float(np.eye(32, dtype=np.float32)))
    rows = jnp.ones(1, jnp.int32)
    x = jnp.ones((1, 32), jnp.float32)
    call, program = cost(lambda x: linear(x, weight, rows), x)
    both, _ = cost(lambda x: linear(x, weight, rows) * 1.5 + 0.5, x)
    print(f"program {program:.1f} us, native call {call:.2f} us, fusion {both - call:.2f} us")


if __name__ == "__main__":
    main()
