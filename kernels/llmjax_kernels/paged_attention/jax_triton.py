"""Paged attention for NVIDIA GPUs: Triton kernels (triton_kernels.py) through jax-triton.

Three launches: new keys and values go into their pages in place, tiles of queries attend, and
where the keys of a tile were shared among programs their parts are put together.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jaxtyping import Array, Float

from ..gpu import Gpu, target
from ..kv_format import SCALE_BYTES
from ..layout import PagedKV
from ..triton_call import HOPPER, available, launch, power_of_two
from .args import AttentionArgs, AttentionSpec
from .tiles import num_tiles

WIDEST = 256
"""Channels of a head."""
LEAST_KEYS = 128
"""Of a split: with fewer, putting parts together costs more than it gains."""
MOST_SPLITS = 64
FILL = 4
"""Programs for each multiprocessor: so many small tiles fit, and uneven lengths level out."""
MOST_ELEMENTS = 8192
"""Of the keys that are loaded together; their values are as many."""
LOG2E = math.log2(math.e)


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


def supports(args: AttentionArgs) -> bool:
    """Heads that fit a program's registers, and rows in pages that it can address."""
    if not available():
        return False
    q, format = args.q, args.kv.format
    aligned = not format.is_scaled or q.shape[2] % SCALE_BYTES == 0
    fits = q.size < 2**31  # rows of queries have 32-bit places; those of pages 64
    return q.shape[2] <= WIDEST and aligned and fits and q.dtype.itemsize <= 4


def run(args: AttentionArgs) -> tuple[Float[Array, "T N H"], PagedKV]:
    from . import triton_kernels as kernels

    gpu = target()
    assert gpu is not None  # supports() has said so
    kv = write(args, gpu)
    return _attend(kernels, gpu, args._replace(kv=kv)), kv


def write(args: AttentionArgs, gpu: Gpu) -> PagedKV:
    """The pages with the step's keys and values, in place."""
    from . import triton_kernels as kernels

    kv, batch = args.kv, args.batch
    S, P = batch.block_tables.shape
    T, K, _ = args.k.shape
    inputs = (
        args.k,
        args.v,
        batch.positions,
        batch.token_seqs,
        batch.query_starts,
        batch.block_tables,
        kv.k,
        kv.v,
        S,
        P,
    )
    k, v = launch(
        kernels.write_kv,
        (T,),
        inputs,
        [ShapeDtypeStruct(x.shape, x.dtype) for x in (kv.k, kv.v)],
        {6: 0, 7: 1},
        gpu=gpu,
        HEADS=power_of_two(K),
        MOST=kv.format.most,
        **_rows(kernels, args),
    )
    return replace(kv, k=k, v=v)


def _attend(kernels: ModuleType, gpu: Gpu, args: AttentionArgs) -> Float[Array, "T N H"]:
    q, kv, batch, spec = args.q, args.kv, args.batch, args.spec
    T, N, H = q.shape
    S, P = batch.block_tables.shape
    K = kv.k.shape[2]
    shape = choose_shape(args, gpu)
    split = shape.splits > 1
    tiles = S if batch.decode_only else num_tiles(T, S, shape.tile)
    tables = (batch.query_starts, batch.kv_lens, batch.block_tables)
    inputs = (q, kv.k, kv.v, *tables, _sinks(args), T, S, P)
    result = ShapeDtypeStruct(q.shape, q.dtype)
    parts = (T, N, shape.splits)
    sums = ShapeDtypeStruct(parts if split else (1,), jnp.float32)
    scale, cap = scale_and_cap(spec)
    out, largest, total = launch(
        kernels.attend,
        (tiles, K, shape.splits),
        (*inputs, shape.splits),
        [ShapeDtypeStruct((*parts, H), jnp.float32) if split else result, sums, sums],
        {},
        gpu=gpu,
        warps=shape.warps,
        stages=shape.stages,
        DECODE_ONLY=batch.decode_only,
        SPLIT=split,
        TILE=shape.tile,
        ROWS=shape.rows,
        KEYS=shape.keys,
        LEAST=max(1, LEAST_KEYS // shape.keys),
        GROUP=N // K,
        SCALE=scale,
        CAP=cap,
        WINDOW=spec.window or 0,
        SINKS=args.sinks is not None,
        **_types(kernels, args),
        **_rows(kernels, args),
    )
    return combine(args, gpu, out, largest, total) if split else out


def combine(
    args: AttentionArgs,
    gpu: Gpu,
    parts: Float[Array, "T N splits H"],
    largest: Float[Array, "T N splits"],
    total: Float[Array, "T N splits"],
) -> Float[Array, "T N H"]:
    """The result from those of splits, in float32; see the kernels `attend` and `combine`."""
    from . import triton_kernels as kernels

    T, N, splits, H = parts.shape
    return launch(
        kernels.combine,
        (T * N,),
        (parts, largest, total, _sinks(args), splits),
        [ShapeDtypeStruct(args.q.shape, args.q.dtype)],
        {},
        gpu=gpu,
        SPLITS=power_of_two(splits),
        HEADS=N,
        H=H,
        WIDTH=_width(H),
        SINKS=args.sinks is not None,
    )[0]


def scale_and_cap(spec: AttentionSpec) -> tuple[float, float]:
    """What the kernels compute scores with, in units of log 2: scale * q.k, or where there is a
    cap cap * tanh(scale / (2 log2 e) * q.k)."""
    if spec.softcap is None:
        return spec.scale * LOG2E, 0.0
    return 2 * spec.scale * LOG2E / spec.softcap, spec.softcap * LOG2E


def choose_shape(args: AttentionArgs, gpu: Gpu) -> Shape:
    """By rule: tiles as large as registers and shared memory allow, splits until the chip is full.

    How many splits there are depends on the bucket alone; where they begin, on the true lengths.
    """
    T, N, H = args.q.shape
    S = args.batch.block_tables.shape[0]
    K, decode_only = args.kv.k.shape[2], args.batch.decode_only
    group, width = N // K, _width(H)
    exact = _dot_type(args) == jnp.float32  # multiplied one by one, in registers
    hopper, scaled = gpu.compute_capability >= HOPPER, args.kv.format.is_scaled
    rows, keys = 16, 16 if exact else min(64, MOST_ELEMENTS // width)
    # An A100's matrix units take operands from registers, of which there are too few for more.
    most = 16384 if hopper or not scaled else 8192
    if not (decode_only or exact):
        rows = min(128, most // max(width, 128), power_of_two(T * group))
        keys = keys if hopper else keys // 2
    rows = max(rows, 16, power_of_two(group))
    tile = 1 if decode_only else rows // group
    tiles = S if decode_only else num_tiles(T, S, tile)
    splits = choose_splits(args, tiles, gpu)
    large = width > 128 or (hopper and rows > 16) if exact else rows * width >= most
    warps = 8 if large else 4
    return Shape(tile, rows, keys, warps, 2 if exact else 3, splits)


def choose_splits(args: AttentionArgs, tiles: int, gpu: Gpu) -> int:
    """As many programs for each of `tiles` and kv heads as fill the chip."""
    _, page_size, K, _ = args.kv.k.shape
    filled = -(-FILL * gpu.multiprocessors // (tiles * K))
    most = args.batch.block_tables.shape[1] * page_size // LEAST_KEYS
    return max(1, min(filled, most, MOST_SPLITS))


def _sinks(args: AttentionArgs) -> Float[Array, " N_or_1"]:
    return jnp.zeros(1, jnp.float32) if args.sinks is None else args.sinks.astype(jnp.float32)


def _dot_type(args: AttentionArgs) -> jnp.dtype:
    """In which queries and keys are multiplied; codes are exact in all of them."""
    format = args.kv.format
    return args.q.dtype if format.is_scaled else jnp.promote_types(args.q.dtype, format.dtype)


def _types(kernels: ModuleType, args: AttentionArgs) -> dict[str, Any]:
    dot = value = _dot_type(args)
    if args.kv.format.is_scaled and dot == jnp.float16:
        # Weights times scales may be less than float16 has.
        value = jnp.dtype(jnp.bfloat16)
    return {
        "DTYPE": getattr(kernels.tl, dot.name),
        "VALUE_DTYPE": getattr(kernels.tl, value.name),
    }


def _rows(kernels: ModuleType, args: AttentionArgs) -> dict[str, Any]:
    """Constants about rows in pages."""
    format, H = args.kv.format, args.q.shape[2]
    codes = {"int8": kernels.INT8, "fp8_e4m3": kernels.E4M3, "fp8_e5m2": kernels.E5M2}
    return {
        "PAGE": args.kv.page_size,
        "KV_HEADS": args.kv.k.shape[2],
        "H": H,
        "ROW": format.width(H),
        "WIDTH": _width(H),
        "STORED": getattr(kernels.tl, (format.storage if format.is_scaled else format.dtype).name),
        "CODE": codes.get(format.name, kernels.FLOAT).value,
    }


def _width(head_dim: int) -> int:
    """Channels that a program computes: a power of two, and what a matrix unit takes."""
    return max(16, power_of_two(head_dim))
