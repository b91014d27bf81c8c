"""Paged attention for NVIDIA GPUs: Triton kernels (triton_kernels.py) through jax-triton.

Three launches: new keys and values go into their pages in place, tiles of queries attend, and
where the keys of a tile were shared among programs their parts are put together.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jaxtyping import Array, Float

from ..gpu import Gpu, target
from ..kv_format import SCALE_BYTES
from ..layout import PagedKV
from ..triton_call import available, launch, power_of_two
from .args import AttentionArgs, AttentionSpec
from .shapes import LEAST_KEYS, Shape, choose_shape, dot_type, tiles_of, width_of

WIDEST = 256
"""Channels of a head."""
LOG2E = math.log2(math.e)


def supports(args: AttentionArgs) -> bool:
    """Heads that fit a program's registers, and rows in pages that it can address."""
    if not available():
        return False
    q, format = args.q, args.kv.format
    aligned = not format.is_scaled or q.shape[2] % SCALE_BYTES == 0
    fits = q.size < 2**31  # rows of queries have 32-bit places; those of pages 64
    return q.shape[2] <= WIDEST and aligned and fits and q.dtype.itemsize <= 4


def run(args: AttentionArgs) -> tuple[Float[Array, "T N H"], PagedKV]:
    gpu = target()
    assert gpu is not None  # supports() has said so
    args = args._replace(kv=write(args, gpu))
    return attend_as(args, choose_shape(args, gpu), gpu), args.kv


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


def attend_as(args: AttentionArgs, shape: Shape, gpu: Gpu) -> Float[Array, "T N H"]:
    """Attention over pages in which the step's keys and values are, cut in a certain way."""
    from . import triton_kernels as kernels

    q, kv, batch, spec = args.q, args.kv, args.batch, args.spec
    T, N, H = q.shape
    S, P = batch.block_tables.shape
    K = kv.k.shape[2]
    split = shape.splits > 1
    tables = (batch.query_starts, batch.kv_lens, batch.block_tables)
    inputs = (q, kv.k, kv.v, *tables, _sinks(args), T, S, P)
    result = ShapeDtypeStruct(q.shape, q.dtype)
    parts = (T, N, shape.splits)
    sums = ShapeDtypeStruct(parts if split else (1,), jnp.float32)
    scale, cap = scale_and_cap(spec)
    out, largest, total = launch(
        kernels.attend,
        (tiles_of(args, shape), K, shape.splits),
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
        WIDTH=width_of(H),
        SINKS=args.sinks is not None,
    )[0]


def scale_and_cap(spec: AttentionSpec) -> tuple[float, float]:
    """What the kernels compute scores with, in units of log 2: scale * q.k, or where there is a
    cap cap * tanh(scale / (2 log2 e) * q.k)."""
    if spec.softcap is None:
        return spec.scale * LOG2E, 0.0
    return 2 * spec.scale * LOG2E / spec.softcap, spec.softcap * LOG2E


def _sinks(args: AttentionArgs) -> Float[Array, " N_or_1"]:
    return jnp.zeros(1, jnp.float32) if args.sinks is None else args.sinks.astype(jnp.float32)


def _types(kernels: ModuleType, args: AttentionArgs) -> dict[str, Any]:
    dot = value = dot_type(args)
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
        "WIDTH": width_of(H),
        "STORED": getattr(kernels.tl, (format.storage if format.is_scaled else format.dtype).name),
        "CODE": codes.get(format.name, kernels.FLOAT).value,
    }
