"""Maximum, argmax, top-k and sums over a large vocabulary by way of small blocks.

XLA's argmax and top_k walk the vocabulary one element at a time on a CPU; reducing blocks
of a row is vectorised, and the few blocks that matter are then cheap to look into.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 64


def in_blocks(values: Float[Array, "R V"], fill: float) -> Float[Array, "R B b"]:
    """Cut each row into blocks of BLOCK, the last one padded with `fill`."""
    R, V = values.shape
    return jnp.pad(values, ((0, 0), (0, -V % BLOCK)), constant_values=fill).reshape(R, -1, BLOCK)


def block_maxima(logits: Float[Array, "R V"]) -> Float[Array, "R B"]:
    return in_blocks(logits, -jnp.inf).max(-1)


def argmax(logits: Float[Array, "R V"], maxima: Float[Array, "R B"]) -> Int[Array, " R"]:
    """The first id of the greatest logit (of NaN where there is one), int32."""
    block = jnp.argmax(maxima, -1)
    inside = block_values(logits, block[:, None])[:, 0]
    return (block * BLOCK + jnp.argmax(inside, -1)).astype(jnp.int32)


def top_k(
    logits: Float[Array, "R V"], maxima: Float[Array, "R B"], k: int
) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """lax.top_k: greatest first, the lower id first among equals.

    Where k exceeds V, the rest is -inf with ids that are not below V.
    """
    R, B = maxima.shape
    if 4 * k >= B:  # most blocks matter
        missing = max(0, k - logits.shape[1])
        padded = jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)
        values, ids = lax.top_k(padded, k)
        return values, ids
    # The k greatest are in the k blocks of greatest maximum; in order of id, so that
    # top_k settles ties as it would over the whole row.
    blocks = jnp.sort(lax.top_k(maxima, k)[1], -1)
    values, index = lax.top_k(block_values(logits, blocks).reshape(R, -1), k)
    ids = jnp.take_along_axis(blocks, index // BLOCK, 1) * BLOCK + index % BLOCK
    return values, ids


def block_values(logits: Float[Array, "R V"], blocks: Int[Array, "R k"]) -> Float[Array, "R k b"]:
    """The logits of whole blocks; -inf past the end of the row."""
    ids = blocks[:, :, None] * BLOCK + jnp.arange(BLOCK)
    rows = jnp.arange(logits.shape[0])[:, None, None]
    return logits.at[rows, ids].get(mode="fill", fill_value=-jnp.inf)


def lane_sums(
    logits: Float[Array, "R V"], term: Callable[[Float[Array, "R n"]], Float[Array, "R n"]]
) -> Float[Array, "R n"]:
    """Sums of term(logits) over n lanes; lane j holds tokens j, j + n, j + 2n, ...

    BLOCK tokens to a lane, added one after the other, so that the sums of a row are the
    same to the bit whatever R is: how XLA orders a reduction depends on the whole shape.
    `term` is 0 at -inf, which fills the last tokens up.
    """
    R, V = logits.shape
    n = -(-V // BLOCK)
    padded = jnp.pad(logits, ((0, 0), (0, n * BLOCK - V)), constant_values=-jnp.inf)
    lanes = padded.reshape(R, BLOCK, n)

    def add(i: Array, sums: Array) -> Array:
        return sums + term(lax.dynamic_index_in_dim(lanes, i, 1, keepdims=False))

    return lax.fori_loop(0, BLOCK, add, jnp.zeros((R, n), jnp.float32))
