"""Checks of GPU code where there is no GPU: `make gpu-check`.

Of a100, h100 and h200 (or those that are named), each in a process of its own: kernels become
machine code, with no registers spilled; whole steps, on one GPU and on eight, update pages in
place, read weights once, compute no more than they must and talk no more than they must; and
faults that are planted are found.
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
SAME_KERNELS = {"h200": "h100"}
"""Targets whose kernels are those of another, which is checked: their chips are the same."""
MOSAIC = ("attend_decodes", "attend_prompts")
"""How the names of Mosaic GPU's kernels begin."""
HOPPER = 90
"""Compute capability."""
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
    if name in SAME_KERNELS:
        other = TARGETS[SAME_KERNELS[name]]
        same = (target.gpu, target.arch, target.shared) == (other.gpu, other.arch, other.shared)
        check(f"kernels are those of {SAME_KERNELS[name]}", same)
        # One target tells: XLA partitions, and loops, alike for all.
        check_sampler(check, target)
        check_loop(check, target)
    else:
        mesh = make_mesh(target)
        check_kernels(check, target, mesh)
        check_faults(check, target, mesh)
    check_steps(check, target)
    print(f"{check.passed} passed, {check.failed} failed")
    return min(1, check.failed)


def check_kernels(check, target, mesh) -> None:
    from products import PRODUCTS

    from kernels import CASES, machine_code

    for name, case in (CASES | PRODUCTS[target.arch]).items():
        for code in machine_code(target, mesh, case, dumps()):
            check(name, code.fits(target), code)
            if code.kernel.startswith(MOSAIC):
                found = f"{code.products} by wgmma, {code.copies} by TMA"
                check(f"{name}: products and copies", min(code.products, code.copies) > 0, found)


def check_steps(check, target) -> None:
    from steps import STEPS, compile_step

    for name, case in STEPS.items():
        step, shape, bucket = compile_step(target, case), case.shape, case.bucket
        check(f"{name}: state updated in place", step.aliased == step.state, step.aliased)
        check(f"{name}: pages copied", step.copies == 0, step.copies)
        launches = (step.launches - case.num_products) / shape.num_layers
        check(f"{name}: launches of attention in a layer", launches in (2, 3), launches)
        check(
            f"{name}: temporaries", step.temporaries < 2**28, f"{step.temporaries / 2**20:.0f} MiB"
        )
        least = case.least_weights
        check(
            f"{name}: weights read",
            least <= step.weights <= TOLERANCE * least,
            f"{step.weights / 1e9:.2f} GB of {least / 1e9:.2f}, and {step.between / 1e9:.2f} GB "
            "between operations",
        )
        check_collectives(check, name, case, step)
        if case.devices == 1:
            check(
                f"{name}: CUDA graphs, and what is in none",
                step.thunks == ["CommandBuffer"],
                step.thunks,
            )
        if case.quantization:
            continue  # Triton's products are not in XLA's count
        least = 2 * (shape.matrix_params * bucket.tokens + shape.head_params * bucket.seqs)
        least /= case.devices
        check(
            f"{name}: operations but those of attention",
            least <= step.operations <= TOLERANCE * least,
            f"{step.operations / 1e12:.2f}e12 of {least / 1e12:.2f}e12",
        )


def check_collectives(check, name, case, step) -> None:
    """Two sums a layer and one of the embedding, of as many numbers as there are tokens."""
    expected = 2 * case.shape.num_layers + 1 if case.devices > 1 else 0
    kinds = [kind for kind, _ in step.collectives]
    found = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "none"
    check(
        f"{name}: collectives of {case.shape.num_layers} layers",
        kinds == ["all-reduce"] * expected,
        found,
    )
    most = 4 * case.bucket.tokens * case.shape.hidden_size
    largest = max((size for _, size in step.collectives), default=0)
    check(f"{name}: bytes of a collective", largest <= most, largest)


def check_sampler(check, target) -> None:
    """Devices that share a vocabulary exchange a few numbers of it, never a row."""
    from steps import STEPS, compile_sampler

    case = STEPS["70B on 8, decode"]
    found = compile_sampler(target, case)
    row, largest = 4 * case.shape.vocab_size, max(size for _, size in found) / case.bucket.seqs
    check(
        "70B on 8, sampler: bytes of a collective, for each row",
        largest <= row / 30,
        f"{largest:.0f} at most, where the logits are {row}",
    )


def check_loop(check, target) -> None:
    """Several steps in one program move no more pages than one."""
    from steps import STEPS, compile_loop

    state, aliased, copies = compile_loop(target, STEPS["8B, decode"], 8)
    check("8B, 8 decode steps: state updated in place", aliased == state, aliased)
    check("8B, 8 decode steps: pages copied", copies == 0, copies)


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
    if target.gpu.compute_capability == HOPPER:
        check_fault_of_mosaic(check, target, mesh)


def check_fault_of_mosaic(check, target, mesh) -> None:
    from kernels import Case, machine_code
    from llmjax_kernels.paged_attention import mosaic_decode

    chosen = mosaic_decode.MOST_CHANNELS
    mosaic_decode.MOST_CHANNELS = 256
    try:
        codes = list(machine_code(target, mesh, Case(head_dim=256, heads=24), dumps()))
    finally:
        mosaic_decode.MOST_CHANNELS = chosen
    [code] = [code for code in codes if code.kernel.startswith("attend_decodes")]
    check("fault: a warpgroup that spills", code.spilled > 0 and not code.fits(target), code)


def dumps() -> Path:
    """Where kernels are written that are compiled."""
    return Path(os.environ["JAX_TRITON_DUMP_DIR"]).parent


def run(name: str) -> tuple[str, int, str]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        folders = {"JAX_TRITON_DUMP_DIR": "triton", "MOSAIC_GPU_DUMP_TO": "mosaic"}
        env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        for variable, toolkit in folders.items():
            (path := Path(folder, toolkit)).mkdir()
            env[variable] = str(path)
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
