"""Launching Triton kernels through jax-triton, where it is installed."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jax import ShapeDtypeStruct
from jaxtyping import Array

from .choice import wanted
from .gpu import Gpu, target

log = logging.getLogger(__name__)

OLDEST = 80
"""Compute capability of an A100: the first with bfloat16 and asynchronous copies."""
HOPPER = 90
LAUNCH = "triton_kernel_call_ffi"
"""What launches are called in a compiled program."""


def available() -> bool:
    """Whether this is an NVIDIA GPU from A100 on, jax-triton is installed, and not forbidden."""
    gpu = target()
    capable = gpu is not None and gpu.compute_capability >= OLDEST
    return capable and wanted() != "xla" and installed()


@functools.cache
def installed() -> bool:
    """Whether Triton and jax-triton are; where not, a warning says what then happens."""
    missing = [name for name in ("jax_triton", "triton") if not importlib.util.find_spec(name)]
    if missing:
        log.warning(
            "kernels run in plain XLA, not in Triton: %s not installed (the extra `gpu`)",
            " and ".join(missing),
        )
    return not missing


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    inputs: Sequence[Array | int | float],
    outputs: Sequence[ShapeDtypeStruct],
    aliases: Mapping[int, int],
    *,
    gpu: Gpu,
    warps: int = 4,
    stages: int = 1,
    **constants: Any,
) -> Sequence[Array]:
    """One launch of a Triton kernel; the tests put Triton's interpreter in its place.

    Args:
        aliases: outputs by the inputs whose memory they take.
        constants: the kernel's `tl.constexpr` parameters.
    """
    import jax_triton

    _let_capture()
    return jax_triton.triton_call(
        *inputs,
        kernel=kernel,
        out_shape=outputs,
        grid=grid,
        input_output_aliases=dict(aliases),
        num_warps=warps,
        num_stages=stages,
        compute_capability=gpu.compute_capability,
        **constants,
    )


@functools.cache
def _let_capture() -> None:
    """Has XLA put launches into CUDA graphs, as it does with its own.

    jax-triton 0.3 has kernels launched by a custom call of which XLA cannot know that it may be
    captured. jaxlib has the same, with the same data, as an FFI handler that says so; jax-triton
    0.4, for newer Pythons and Tritons, uses that one.
    """
    import jax_triton.triton_lib
    from jax import ffi
    from jax.interpreters import mlir

    lib = jax_triton.triton_lib

    def lower(ctx: Any, *args: Any, **parameters: Any) -> Any:
        call = lib.triton_kernel_call_lowering(lib.get_cuda_backend, ctx, *args, **parameters)
        old = call[0].owner
        opaque = old.attributes["backend_config"].value_bytes
        aliases = dict(parameters["input_output_aliases"])
        rule = ffi.ffi_lowering(LAUNCH, api_version=4, operand_output_aliases=aliases)
        new = rule(ctx, *args, opaque=opaque)
        old.erase()
        return new

    mlir.register_lowering(lib.triton_kernel_call_p, lower, platform="cuda")


def power_of_two(n: int) -> int:
    """The smallest that is no less."""
    return 1 << (n - 1).bit_length()
