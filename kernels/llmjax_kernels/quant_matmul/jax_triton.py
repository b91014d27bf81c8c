"""Products with quantised weights for NVIDIA GPUs: Triton kernels (triton_kernels.py)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jaxtyping import Array, Float

from ..gpu import Gpu, target
from ..triton_call import available, launch
from .args import QuantMatmulArgs
from .inputs import quantise_rows
from .shapes import Shape, choose_shape
from .weight import QuantFormat

FP8_UNITS = 89
"""Compute capability of the first GPUs that multiply FP8."""


def supports(args: QuantMatmulArgs) -> bool:
    """Groups that are a power of two."""
    if not available():
        return False
    gpu, format = target(), args.weight.format
    (M, K), N = args.x.shape, args.weight.shape[0]
    # Places of rows of x and of a part are 32 bits; those of weights 64.
    fits = max(M * K, M * N) < 2**31 and args.x.dtype.itemsize <= 4
    return gpu is not None and fits and format.group & (format.group - 1) == 0


def multiplies_codes(format: QuantFormat, gpu: Gpu) -> bool:
    """Whether codes are multiplied by codes: a GPU's matrix units take those of `format`."""
    known = format.code != "fp8_e4m3" or gpu.compute_capability >= FP8_UNITS
    return format.of_codes and known


def run(args: QuantMatmulArgs) -> Float[Array, "M N"]:
    gpu = target()
    assert gpu is not None  # supports() has said so
    if not multiplies_codes(args.weight.format, gpu):
        args = args.with_rounded_inputs()
    return run_as(args, choose_shape(args, gpu), gpu)


def run_as(args: QuantMatmulArgs, shape: Shape, gpu: Gpu) -> Float[Array, "M N"]:
    """The product, cut in a certain way; inputs that are rounded are multiplied as codes."""
    from . import triton_kernels as kernels

    x, weight, out_dtype = args
    (M, K), (N, _), format = x.shape, weight.shape, weight.format
    out = ShapeDtypeStruct((shape.splits, M, N), out_dtype if shape.splits == 1 else jnp.float32)
    codes = {"int4": kernels.INT4, "int8": kernels.INT8, "fp8_e4m3": kernels.E4M3}
    common = {
        "gpu": gpu,
        "warps": shape.warps,
        "stages": shape.stages,
        "N": N,
        "K": K,
        "GROUP": format.group or K,
        "GROUP_BYTES": weight.codes.shape[2],
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "BLOCK_K": shape.block_k,
        "GROUPED": format.group > 0,
        "CODE": codes[format.code].value,
    }
    grid = (-(-M // shape.block_m), -(-N // shape.block_n), shape.splits)
    factor = 2.0**weight.exponent
    if format.inputs is not None:
        rows = quantise_rows(x, format.inputs, weight.static_inputs)
        factors = (*rows, weight.codes, weight.scales)
        inputs = (*factors, M, shape.splits, factor)
        parts = launch(kernels.codes_by_codes, grid, inputs, [out], {}, **common)[0]
    else:
        units = jnp.zeros(1, jnp.float16) if weight.units is None else weight.units
        parts = launch(
            kernels.dequantised,
            grid,
            (x, weight.codes, weight.scales, units, M, shape.splits, factor),
            [out],
            {},
            MINIMA=format.minima,
            SPAN=format.span,
            ZERO=format.zero,
            DTYPE=getattr(kernels.tl, x.dtype.name),
            **common,
        )[0]
    return parts[0] if shape.splits == 1 else jnp.sum(parts, axis=0).astype(out_dtype)
