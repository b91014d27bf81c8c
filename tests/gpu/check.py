"""Checks of GPU code where there is no GPU: `make gpu-check`.

Of a100, h100 and h200 (or those that are named), each in a process of its own: kernels become
machine code, with no registers spilled; whole steps update pages in place, read weights once and
compute no more than they must; and faults that are planted are found.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TARGETS = ("a100", "h100", "h200")
TOLERANCE = 1.1
"""Of bytes and operations, over the least there can be."""


class Checks:
    """What was checked, and how it came out."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def __call__(self, what: str, ok: bool, found: object = "") -> None:
        print(f"  {'ok    ' if ok else 'FAILED'} {what}: {found}", flush=True)
        self.passed, self.failed = self.passed + ok, self.failed + (not ok)


def check_target(name: str) -> int:
    """Everything of one target; the exit status."""
    from aot import make_mesh
    from targets import TARGETS

    target, check = TARGETS[name], Checks()
    mesh = make_mesh(target)
    check_kernels(check, target, mesh)
    check_steps(check, target, mesh)
    check_faults(check, target, mesh)
    print(f"{check.passed} passed, {check.failed} failed")
    return min(1, check.failed)


def check_kernels(check, target, mesh) -> None:
    from products import PRODUCTS

    from kernels import CASES, machine_code

    for name, case in (CASES | PRODUCTS[target.arch]).items():
        for code in machine_code(target, mesh, case, dumps()):
            check(name, code.fits(target), code)


def check_steps(check, target, mesh) -> None:
    from steps import SHAPE, STEPS, compile_step, least_weights, products

    for name, (bucket, quantization) in STEPS.items():
        step = compile_step(target, mesh, bucket, quantization)
        check(f"{name}: state updated in place", step.aliased == step.state, step.aliased)
        check(f"{name}: pages copied", step.copies == 0, step.copies)
        launches = (step.launches - products(quantization)) / SHAPE.num_layers
        check(f"{name}: launches of attention in a layer", launches in (2, 3), launches)
        check(
            f"{name}: temporaries", step.temporaries < 2**28, f"{step.temporaries / 2**20:.0f} MiB"
        )
        least = least_weights(quantization)
        check(
            f"{name}: weights read",
            least <= step.weights <= TOLERANCE * least,
            f"{step.weights / 1e9:.2f} GB of {least / 1e9:.2f}, and {step.between / 1e9:.2f} GB "
            "between operations",
        )
        if quantization:
            continue  # Triton's products are not in XLA's count
        least = 2 * (SHAPE.matrix_params * bucket.tokens + SHAPE.head_params * bucket.seqs)
        check(
            f"{name}: operations but those of attention",
            least <= step.operations <= TOLERANCE * least,
            f"{step.operations / 1e12:.2f}e12 of {least / 1e12:.2f}e12",
        )


def check_faults(check, target, mesh) -> None:
    """What is wrong on purpose, and must be seen to be wrong."""
    from kernels import Case, machine_code
    from llmjax_kernels.paged_attention import jax_triton

    compiled = Case().compile(target, mesh, donate=False)
    aliased = compiled.memory_analysis().alias_size_in_bytes
    check("fault: pages not donated", aliased == 0, f"{aliased} bytes aliased")
    chosen = jax_triton.choose_shape
    for fault, changes in {
        "a tile that spills": {"rows": 128, "tile": 32, "keys": 64, "warps": 1},
        "a tile beyond shared memory": {"keys": 256, "warps": 8, "stages": 5},
    }.items():
        jax_triton.choose_shape = lambda *args, c=changes: chosen(*args)._replace(**c)
        try:
            codes = list(machine_code(target, mesh, Case(tokens=256, seqs=4), dumps()))
        finally:
            jax_triton.choose_shape = chosen
        [code] = [code for code in codes if code.kernel == "attend"]
        found = code.spilled if "spills" in fault else code.shared > target.shared_of_block
        check(f"fault: {fault}", bool(found) and not code.fits(target), code)


def dumps() -> Path:
    """Where jax-triton writes what it compiles."""
    return Path(os.environ["JAX_TRITON_DUMP_DIR"])


def run(name: str) -> tuple[str, int, str]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"JAX_TRITON_DUMP_DIR": folder, "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, "-W", "ignore", __file__, "--one", name]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    said = done.stdout + (done.stderr[-4000:] if done.returncode else "")
    return f"{name}, {time.perf_counter() - start:.0f} s", done.returncode, said


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        return check_target(sys.argv[2])
    status = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for title, code, said in pool.map(run, sys.argv[1:] or TARGETS):
            print(f"{title}\n{said}", flush=True)
            status |= code != 0
    return status


if __name__ == "__main__":
    sys.exit(main())
