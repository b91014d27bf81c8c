"""Pages as rows, one of each position and head, in whichever layout a pool has.

For what is done to pages now and then; kernels read and write them in place.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from .kv_format import SCALE_BYTES
from .layout import PagedKV
from .native.blocks import LANES


def read_rows(
    kv: PagedKV, layer: int, pages: Int[Array, " n"]
) -> tuple[Shaped[Array, "tokens K W"], Shaped[Array, "tokens K W"]]:
    """Keys and values of some pages, as `KVFormat.encode` gives them.

    Args:
        layer: which of a pool of all layers (`native.blocks.make_pages`); a pool of one layer
            ([pages, page_size, K, W]) has only 0.
    """
    if kv.k.ndim == 4:
        k, v = (x[pages].reshape(-1, *x.shape[2:]) for x in (kv.k, kv.v))
    else:
        k, v = (
            _from_blocks(x[layer, pages], kv.format.is_scaled, by_channel)
            for x, by_channel in ((kv.k, True), (kv.v, False))
        )
    return k, v


def to_pages(
    kv: PagedKV, keys: Shaped[Array, "tokens K W"], values: Shaped[Array, "tokens K W"]
) -> tuple[Shaped[Array, "n ..."], Shaped[Array, "n ..."]]:
    """Rows as whole pages of one layer of a pool; the other way of `read_rows`."""
    if kv.k.ndim == 4:
        k, v = (x.reshape(-1, *kv.k.shape[1:]) for x in (keys, values))
    else:
        k, v = (
            _to_blocks(rows, kv.k.shape, kv.format.is_scaled, by_channel)
            for rows, by_channel in ((keys, True), (values, False))
        )
    return k, v


def _from_blocks(x: Array, is_scaled: bool, by_channel: bool) -> Array:
    """[n, K, blocks, 16 W] as rows [n * blocks * 16, K, W]."""
    n, K, blocks, size = x.shape
    width = size // LANES
    head_dim = width - SCALE_BYTES if is_scaled else width
    codes = x[..., : LANES * head_dim]
    if by_channel:
        codes = codes.reshape(n, K, blocks, head_dim, LANES).swapaxes(-1, -2)
    else:
        codes = codes.reshape(n, K, blocks, LANES, head_dim)
    if is_scaled:
        scales = x[..., LANES * head_dim :].reshape(n, K, blocks, LANES, SCALE_BYTES)
        codes = jnp.concatenate([codes, scales], -1)
    return jnp.moveaxis(codes, 1, 3).reshape(n * blocks * LANES, K, width)


def _to_blocks(rows: Array, shape: tuple[int, ...], is_scaled: bool, by_channel: bool) -> Array:
    """The other way: rows as [n, K, blocks, 16 W] of a pool of this shape."""
    _, _, K, blocks, size = shape
    width = size // LANES
    num_pages = len(rows) // (blocks * LANES)
    x = jnp.moveaxis(rows.reshape(num_pages, blocks, LANES, K, width), 3, 1)
    codes, scales = (x[..., :-SCALE_BYTES], x[..., -SCALE_BYTES:]) if is_scaled else (x, None)
    if by_channel:
        codes = codes.swapaxes(-1, -2)
    codes = codes.reshape(num_pages, K, blocks, -1)
    if scales is None:
        return codes
    return lax.concatenate([codes, scales.reshape(num_pages, K, blocks, -1)], 3)
