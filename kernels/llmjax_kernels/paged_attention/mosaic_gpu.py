"""Paged attention for Hopper: decodes in Pallas Mosaic GPU (mosaic_kernels.py).

Of what Triton's backend does in three launches this is the second: `attend`, by TMA and wgmma.
Steps with prompts in them, and whatever else is not supported here, are Triton's.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from ..choice import wanted
from ..gpu import Gpu, target
from ..layout import PagedKV
from ..triton_call import HOPPER, available
from . import jax_triton
from .args import AttentionArgs

HEAD_DIMS = (64, 128, 256)
ROWS = 64
"""The smallest product that Hopper has; as many query heads may share a kv head."""
KEYS = 64
"""Of a block."""
TMA_ROWS = 8
"""Of a tile that TMA moves."""
OLDEST_JAX = (0, 11)
"""The first whose interpreter runs the kernel, and that it was compiled with."""
SHARED = 112 * 1024
"""Bytes of shared memory for a program, so that two fit a multiprocessor."""
MOST_STAGES = 4


def serves() -> bool:
    """Whether this is a Hopper, Triton is there for the rest, and neither old nor forbidden.

    wgmma is Hopper's alone: later GPUs lack it.
    """
    gpu = target()
    hopper = gpu is not None and gpu.compute_capability == HOPPER
    return hopper and available() and wanted() != "triton" and jax.__version_info__ >= OLDEST_JAX


def supports(args: AttentionArgs) -> bool:
    """Decodes of 16-bit floats, in pages of whole tiles."""
    if not serves():
        return False
    q, format, page_size = args.q, args.kv.format, args.kv.page_size
    _, N, H = q.shape
    floats = q.dtype in ("bfloat16", "float16") and q.dtype == format.dtype
    tiles = page_size % TMA_ROWS == 0 and (KEYS % page_size == 0 or page_size % KEYS == 0)
    fits = H in HEAD_DIMS and N // args.kv.k.shape[2] <= ROWS
    return args.batch.decode_only and floats and tiles and fits


def run(args: AttentionArgs) -> tuple[Float[Array, "T N H"], PagedKV]:
    gpu = target()
    assert gpu is not None  # supports() has said so
    kv = jax_triton.write(args, gpu)
    return _attend(args._replace(kv=kv), gpu), kv


def _attend(args: AttentionArgs, gpu: Gpu) -> Float[Array, "S N H"]:
    from . import mosaic_kernels as kernels

    q, kv, batch, spec = args.q, args.kv, args.batch, args.spec
    S, N, H = q.shape
    K = kv.k.shape[2]
    splits = jax_triton.choose_splits(args, S, gpu)
    parts, largest, total = kernels.attend(
        q.reshape(S, K, N // K, H),
        kv.format.decode(kv.k, q.dtype),
        kv.format.decode(kv.v, q.dtype),
        batch.kv_lens,
        batch.block_tables,
        kernels.Arithmetic(*jax_triton.scale_and_cap(spec), spec.window or 0),
        kernels.Cut(splits, choose_stages(H), jax_triton.LEAST_KEYS // KEYS),
    )

    def of_heads(rows: Float[Array, "S K splits rows"]) -> Float[Array, "S N splits"]:
        return rows[..., : N // K].swapaxes(2, 3).reshape(S, N, splits)

    return jax_triton.combine(args, gpu, parts, of_heads(largest), of_heads(total))


def choose_stages(head_dim: int) -> int:
    """Blocks of keys and values under way at once: as many as shared memory has room for beside
    queries and weights, two at least."""
    queries, weights, block = ROWS * head_dim * 2, ROWS * KEYS * 2, 2 * KEYS * head_dim * 2
    return min(max(2, (SHARED - queries - weights) // block), MOST_STAGES)
