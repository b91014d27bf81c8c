"""Products with quantised weights for NVIDIA GPUs: Triton kernels (triton_kernels.py)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jaxtyping import Array, Float

from ..gpu import Gpu, target
from ..triton_call import HOPPER, available, launch, power_of_two
from .args import QuantMatmulArgs
from .weight import QuantFormat, quantise_rows

FP8_UNITS = 89
"""Compute capability of the first GPUs that multiply FP8."""
FEW_ROWS = 64
"""Up to so many, weights are read for little work: memory decides."""
FILL = 3
"""Programs for each multiprocessor, so that enough loads are under way."""
LEAST_BLOCKS = 4
"""Of a split: with fewer its loads hardly overlap."""
MOST_SPLITS = 32
PARTS_SHARE = 32
"""Splits are at most K / (this * M): what they write and add up stays less than the weights."""


SHORT = 4
"""Blocks so many times shorter are loaded twice as many ahead."""


class Shape(NamedTuple):
    """How a product is cut.

    Attributes:
        block_m, block_n, block_k: of a tile.
        warps, stages: of a program; loads of so many blocks are under way at once.
        splits: programs that share the inputs of a tile.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int


def supports(args: QuantMatmulArgs) -> bool:
    """Groups that are a power of two, and FP8 times FP8 where a GPU has it."""
    if not available():
        return False
    gpu, format = target(), args.weight.format
    (M, K), N = args.x.shape, args.weight.shape[0]
    capable = gpu is not None and multiplies_codes(format, gpu)
    # Places of rows of x and of a part are 32 bits; those of weights 64.
    fits = max(M * K, M * N) < 2**31 and args.x.dtype.itemsize <= 4
    return capable and fits and format.group & (format.group - 1) == 0


def multiplies_codes(format: QuantFormat, gpu: Gpu) -> bool:
    """Whether a GPU's matrix units take the codes of `format`, if it asks for that."""
    asked = format.quantised_inputs and format.code == "fp8_e4m3"
    return not asked or gpu.compute_capability >= FP8_UNITS


def run(args: QuantMatmulArgs) -> Float[Array, "M N"]:
    from . import triton_kernels as kernels

    x, weight, out_dtype = args
    (M, K), (N, _), format = x.shape, weight.shape, weight.format
    gpu = target()
    assert gpu is not None  # supports() has said so
    shape = choose_shape(args, gpu)
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
    if format.quantised_inputs:
        factors = (*quantise_rows(x, format), weight.codes, weight.scales)
        inputs = (*factors, M, shape.splits, factor)
        parts = launch(kernels.codes_by_codes, grid, inputs, [out], {}, **common)[0]
    else:
        parts = launch(
            kernels.dequantised,
            grid,
            (x, weight.codes, weight.scales, M, shape.splits, factor),
            [out],
            {},
            MINIMA=format.minima,
            DTYPE=getattr(kernels.tl, x.dtype.name),
            **common,
        )[0]
    return parts[0] if shape.splits == 1 else jnp.sum(parts, axis=0).astype(out_dtype)


def choose_shape(args: QuantMatmulArgs, gpu: Gpu) -> Shape:
    """By rule: for few rows, tiles that read long pieces of many rows of the weights, shared
    among programs until the chip is busy; for many, tiles as large as registers allow."""
    (M, K), N, format = args.x.shape, args.weight.shape[0], args.weight.format
    rows, hopper = max(16, power_of_two(M)), gpu.compute_capability >= HOPPER
    scaled_sums = format.quantised_inputs and format.group > 0  # are in registers twice
    if args.x.dtype == jnp.float32 and not format.quantised_inputs:
        shape = Shape(min(rows, 32), 64, 32, 4, 2, 1)  # multiplied one by one, in registers
    elif M <= FEW_ROWS:
        shape = Shape(rows, min(128, 4096 // rows), 128, 4, 4, 1)
    else:
        most = 64 if scaled_sums else 128
        shape = Shape(min(rows, most), 128 if hopper else 64, 64, 8 if hopper else 4, 3, 1)
    if format.group:  # a block is of one group; of codes by codes, all of it
        block_k = format.group if scaled_sums else min(format.group, shape.block_k)
        short = block_k * SHORT <= shape.block_k
        shape = shape._replace(block_k=block_k, stages=shape.stages * 2 if short else shape.stages)
    tiles = -(-M // shape.block_m) * -(-N // shape.block_n)
    splits = min(
        -(-FILL * gpu.multiprocessors // tiles),
        K // (shape.block_k * LEAST_BLOCKS),
        K // (PARTS_SHARE * M),
        MOST_SPLITS,
    )
    return shape._replace(splits=max(1, splits))
