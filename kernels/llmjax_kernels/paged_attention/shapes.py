"""How attention over pages is cut among a GPU's programs: measured, or by rule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp

from .. import tuned
from ..gpu import Gpu
from ..triton_call import HOPPER, power_of_two
from .args import AttentionArgs
from .tiles import num_tiles

OP = "paged_attention"
LEAST_KEYS = 128
"""Of a split: with fewer, putting parts together costs more than it gains."""
MOST_SPLITS = 64
FILL = 4
"""Programs for each multiprocessor: so many small tiles fit, and uneven lengths level out."""
MOST_ELEMENTS = 8192
"""Of the keys that are loaded together; their values are as many."""
OPTIONS = {
    "rows": (16, 32, 64, 128),
    "keys": (16, 32, 64, 128),
    "warps": (2, 4, 8),
    "stages": (1, 2, 3, 4, 6),
    "splits": (1, 2, 4, 8, 16, 32, 64),
}
"""What is tried where shapes are measured."""


class Shape(NamedTuple):
    """How the work of `attend` is cut.

    Attributes:
        tile: tokens of a tile.
        rows: of a tile: its tokens' heads, up to a power of two.
        keys: loaded together.
        warps, stages: of a program; loads of so many blocks of keys are under way at once.
        splits: programs that share the keys of a tile.
    """

    tile: int
    rows: int
    keys: int
    warps: int
    stages: int
    splits: int


def size_of(args: AttentionArgs) -> str:
    """Steps that are cut alike: room for keys counts up to a power of two."""
    (T, N, H), kv = args.q.shape, args.kv
    S, P = args.batch.block_tables.shape
    kind = "decode" if args.batch.decode_only else "mixed"
    heads = f"{N}/{kv.k.shape[2]}x{H} {args.q.dtype.name} {kv.format.name}"
    return f"{kind} {heads} {T}x{S}x{power_of_two(P * kv.page_size)}"


def choose_shape(args: AttentionArgs, gpu: Gpu) -> Shape:
    """What was measured on this kind of device, or else `by_rule`.

    How many splits there are depends on the bucket alone; where they begin, on the true lengths.
    """
    found = tuned.entries(gpu.kind, OP).get(size_of(args))
    return Shape(**found) if found else by_rule(args, gpu)


def by_rule(args: AttentionArgs, gpu: Gpu) -> Shape:
    """Tiles as large as registers and shared memory allow, splits until the chip is full."""
    T, N, H = args.q.shape
    K, decode_only = args.kv.k.shape[2], args.batch.decode_only
    group, width = N // K, width_of(H)
    exact = dot_type(args) == jnp.float32  # multiplied one by one, in registers
    hopper, scaled = gpu.compute_capability >= HOPPER, args.kv.format.is_scaled
    rows, keys = 16, 16 if exact else min(64, MOST_ELEMENTS // width)
    # An A100's matrix units take operands from registers, of which there are too few for more.
    most = 16384 if hopper or not scaled else 8192
    if not (decode_only or exact):
        rows = min(128, most // max(width, 128), power_of_two(T * group))
        keys = keys if hopper else keys // 2
    rows = max(rows, 16, power_of_two(group))
    large = width > 128 or (hopper and rows > 16) if exact else rows * width >= most
    shape = Shape(_tile(args, rows), rows, keys, 8 if large else 4, 2 if exact else 3, 1)
    return shape._replace(splits=choose_splits(args, tiles_of(args, shape), gpu))


def tiles_of(args: AttentionArgs, shape: Shape) -> int:
    """How many tiles a step has room for."""
    T, S = args.q.shape[0], args.batch.block_tables.shape[0]
    return S if args.batch.decode_only else num_tiles(T, S, shape.tile)


def choose_splits(args: AttentionArgs, tiles: int, gpu: Gpu) -> int:
    """As many programs for each of `tiles` and kv heads as fill the chip."""
    filled = -(-FILL * gpu.multiprocessors // (tiles * args.kv.k.shape[2]))
    return max(1, min(filled, most_splits(args)))


def most_splits(args: AttentionArgs) -> int:
    """So many that none is left with too few keys."""
    room = args.batch.block_tables.shape[1] * args.kv.page_size
    return max(1, min(room // LEAST_KEYS, MOST_SPLITS))


def candidates(args: AttentionArgs, shape: Shape) -> Iterable[Shape]:
    """Shapes that differ from `shape` in one field and can compute `args`."""
    group = args.q.shape[1] // args.kv.k.shape[2]
    for name, values in OPTIONS.items():
        for value in values:
            other = shape._replace(**{name: value})
            other = other._replace(tile=_tile(args, other.rows))
            fits = other.rows >= max(16, power_of_two(group)) and other.splits <= most_splits(args)
            if fits and other != shape:
                yield other


def dot_type(args: AttentionArgs) -> jnp.dtype:
    """In which queries and keys are multiplied; codes are exact in all of them."""
    format = args.kv.format
    return args.q.dtype if format.is_scaled else jnp.promote_types(args.q.dtype, format.dtype)


def width_of(head_dim: int) -> int:
    """Channels that a program computes: a power of two, and what a matrix unit takes."""
    return max(16, power_of_two(head_dim))


def _tile(args: AttentionArgs, rows: int) -> int:
    return 1 if args.batch.decode_only else rows // (args.q.shape[1] // args.kv.k.shape[2])
