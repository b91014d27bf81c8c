"""Paged attention for Hopper, in Pallas Mosaic GPU, by TMA and wgmma.

Of what Triton's backend does in three launches this is the second: `attend`, for decodes
(mosaic_decode.py) and, where it is asked for, for steps with prompts in them (mosaic_prefill.py).
What is not supported here is Triton's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..choice import wanted
from ..gpu import Gpu, target
from ..layout import PagedKV
from ..triton_call import HOPPER, available
from . import jax_triton
from .args import AttentionArgs
from .shapes import LEAST_KEYS, choose_splits
from .tiles import cut_into_tiles

HEAD_DIMS = (64, 128, 256)
ROWS = 64
"""The smallest product that Hopper has; as many query heads may share a kv head."""
KEYS = 64
"""Of a block, in decodes."""
PROMPT_HEAD_DIMS = (64, 128)
PROMPT_KEYS = 128
"""Of a block, where there are prompts."""
UNITS = 16
"""Of 8 rows, in a tile of queries: 8 tokens of one head each."""
TMA_ROWS = 8
"""Of a tile that TMA moves."""
OLDEST_JAX = (0, 11)
"""The first whose interpreter runs the kernel, and that it was compiled with."""
SHARED = 112 * 1024
"""Bytes of shared memory for a program that decodes, so that two fit a multiprocessor."""
SHARED_OF_BLOCK = 227 * 1024
"""What a program may have at most."""
MOST_STAGES = 4


def serves() -> bool:
    """Whether this is a Hopper, Triton is there for the rest, and neither old nor forbidden.

    wgmma is Hopper's alone: later GPUs lack it.
    """
    gpu = target()
    hopper = gpu is not None and gpu.compute_capability == HOPPER
    return hopper and available() and wanted() != "triton" and jax.__version_info__ >= OLDEST_JAX


def supports(args: AttentionArgs) -> bool:
    """16-bit floats, in pages of whole tiles: decodes, and with `LLMJAX_KERNELS=mosaic` prompts.

    No GPU has run the kernel for prompts yet; until one has, Triton's is the default.
    """
    if not serves():
        return False
    q, format = args.q, args.kv.format
    floats = q.dtype in ("bfloat16", "float16") and q.dtype == format.dtype
    if args.batch.decode_only:
        return floats and _supports_decodes(args)
    return floats and wanted() == "mosaic" and _supports_prompts(args)


def _supports_decodes(args: AttentionArgs) -> bool:
    _, N, H = args.q.shape
    fits = H in HEAD_DIMS and N // args.kv.k.shape[2] <= ROWS
    return fits and _are_tiles(args.kv.page_size, KEYS)


def _supports_prompts(args: AttentionArgs) -> bool:
    """Steps of enough tiles for all multiprocessors: of fewer Triton shares the keys."""
    gpu = target()
    assert gpu is not None  # serves() has said so
    T, N, H = args.q.shape
    K = args.kv.k.shape[2]
    if H not in PROMPT_HEAD_DIMS or N // K > UNITS or T % TMA_ROWS or args.spec.scale <= 0:
        return False
    busy = -(-T // tile_size(N // K)) * K >= gpu.multiprocessors
    return busy and _are_tiles(args.kv.page_size, PROMPT_KEYS)


def _are_tiles(page_size: int, keys: int) -> bool:
    """Whether TMA can fill blocks of keys from pages."""
    fits = keys % page_size == 0 or page_size % keys == 0
    return page_size % TMA_ROWS == 0 and fits


def run(args: AttentionArgs) -> tuple[Float[Array, "T N H"], PagedKV]:
    gpu = target()
    assert gpu is not None  # supports() has said so
    kv = jax_triton.write(args, gpu)
    args = args._replace(kv=kv)
    return (_decode(args, gpu) if args.batch.decode_only else _prefill(args)), kv


def _decode(args: AttentionArgs, gpu: Gpu) -> Float[Array, "S N H"]:
    from . import mosaic_common as common
    from . import mosaic_decode as kernels

    q, kv, batch, spec = args.q, args.kv, args.batch, args.spec
    S, N, H = q.shape
    K = kv.k.shape[2]
    splits = choose_splits(args, S, gpu)
    parts, largest, total = kernels.attend(
        q.reshape(S, K, N // K, H),
        kv.format.decode(kv.k, q.dtype),
        kv.format.decode(kv.v, q.dtype),
        batch.kv_lens,
        batch.block_tables,
        common.Arithmetic(*jax_triton.scale_and_cap(spec), spec.window or 0),
        kernels.Cut(splits, choose_stages(H), LEAST_KEYS // KEYS),
    )

    def of_heads(rows: Float[Array, "S K splits rows"]) -> Float[Array, "S N splits"]:
        return rows[..., : N // K].swapaxes(2, 3).reshape(S, N, splits)

    return jax_triton.combine(args, gpu, parts, of_heads(largest), of_heads(total))


def _prefill(args: AttentionArgs) -> Float[Array, "T N H"]:
    from . import mosaic_common as common
    from . import mosaic_prefill as kernels

    q, kv, batch, spec = args.q, args.kv, args.batch, args.spec
    _, N, H = q.shape
    sinks = jnp.full(N, common.NOTHING, jnp.float32)
    if args.sinks is not None:
        sinks = args.sinks.astype(jnp.float32) * jax_triton.LOG2E
    return kernels.attend(
        q,
        kv.format.decode(kv.k, q.dtype),
        kv.format.decode(kv.v, q.dtype),
        cut_into_tiles(batch, tile_size(N // kv.k.shape[2])),
        batch.block_tables,
        sinks,
        common.Arithmetic(*jax_triton.scale_and_cap(spec), spec.window or 0),
        choose_prompt_stages(H),
    )


def tile_size(group: int) -> int:
    """Tokens of a tile, all query heads of a kv head with each."""
    return UNITS // group * TMA_ROWS


def choose_stages(head_dim: int) -> int:
    """Blocks of keys and values under way at once: as many as shared memory has room for beside
    queries and weights, two at least."""
    queries, weights, block = ROWS * head_dim * 2, ROWS * KEYS * 2, 2 * KEYS * head_dim * 2
    return min(max(2, (SHARED - queries - weights) // block), MOST_STAGES)


def choose_prompt_stages(head_dim: int) -> int:
    """Likewise, beside queries and, twice, results; some bytes are barriers."""
    rows, block = UNITS * TMA_ROWS * head_dim * 2, 2 * PROMPT_KEYS * head_dim * 2
    return min((SHARED_OF_BLOCK - 1024 - 3 * rows) // block, MOST_STAGES)
