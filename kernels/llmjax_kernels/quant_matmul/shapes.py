"""How a product with a quantised weight is cut among a GPU's programs: measured, or by rule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp

from .. import tuned
from ..gpu import Gpu
from ..triton_call import HOPPER, power_of_two
from .args import QuantMatmulArgs

OP = "quant_matmul"
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
OPTIONS = {
    "block_m": (16, 32, 64, 128),
    "block_n": (32, 64, 128, 256),
    "block_k": (32, 64, 128, 256),
    "warps": (4, 8),
    "stages": (2, 3, 4, 6, 8),
    "splits": (1, 2, 4, 8, 16, 32),
}
"""What is tried where shapes are measured."""


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


def size_of(args: QuantMatmulArgs) -> str:
    """Products that are cut alike: rows count up to a power of two."""
    format, (M, K), N = args.weight.format, args.x.shape, args.weight.shape[0]
    kind = f"{format.code}/{format.group}" + "+minima" * format.minima
    kind += f"/{format.span}" if format.span else ""
    inputs = format.code if format.inputs else args.x.dtype.name
    return f"{kind} {inputs} {max(16, power_of_two(M))}x{N}x{K}"


def choose_shape(args: QuantMatmulArgs, gpu: Gpu) -> Shape:
    """What was measured on this kind of device, or else `by_rule`."""
    found = tuned.entries(gpu.kind, OP).get(size_of(args))
    return Shape(**found) if found else by_rule(args, gpu)


def by_rule(args: QuantMatmulArgs, gpu: Gpu) -> Shape:
    """For few rows, tiles that read long pieces of many rows of the weights, shared
    among programs until the chip is busy; for many, tiles as large as registers allow."""
    (M, K), N, format = args.x.shape, args.weight.shape[0], args.weight.format
    rows, hopper = max(16, power_of_two(M)), gpu.compute_capability >= HOPPER
    scaled_sums = format.inputs is not None and format.group > 0  # are in registers twice
    if args.x.dtype == jnp.float32 and format.inputs is None:
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


def candidates(args: QuantMatmulArgs, shape: Shape) -> Iterable[Shape]:
    """Shapes that differ from `shape` in one field and can compute `args`."""
    group = args.weight.format.group
    for name, values in OPTIONS.items():
        for value in values:
            other = shape._replace(**{name: value})
            fits = group % other.block_k == 0
            if args.weight.format.inputs and group:
                fits = other.block_k == group
            if fits and other != shape:
                yield other
