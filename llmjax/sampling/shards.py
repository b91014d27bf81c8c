"""Logits of which each device has the columns of its own tokens.

Functions here and beside take `axis`, the mesh axis that divides the vocabulary, within
`jax.shard_map`; None is a device that has it all. What they return is the same on every device:
they reduce what is theirs and exchange a few numbers a row, never a row.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def vocab_size(logits: Float[Array, "R V"], axis: str | None) -> int:
    """Of all devices."""
    return logits.shape[1] * (1 if axis is None else lax.axis_size(axis))


def first_id(logits: Float[Array, "R V"], axis: str | None) -> Int[Array, ""] | int:
    """The id of the first column here."""
    return 0 if axis is None else lax.axis_index(axis) * logits.shape[1]


def add_up(values: Array, axis: str | None) -> Array:
    return values if axis is None else lax.psum(values, axis)


def greatest(values: Array, axis: str | None) -> Array:
    return values if axis is None else lax.pmax(values, axis)


def at_ids(
    logits: Float[Array, "R V"], ids: Int[Array, "R k"], axis: str | None
) -> Float[Array, "R k"]:
    """The logits of some tokens of each row; -inf of ids that are past the vocabulary."""
    R, V = logits.shape
    rows = jnp.arange(R)[:, None]
    if axis is None:
        return logits.at[rows, ids].get(mode="fill", fill_value=-jnp.inf)
    here = ids - first_id(logits, axis)
    # A negative index would count from the end.
    here = jnp.where(here >= 0, here, V)
    found = lax.psum(logits.at[rows, here].get(mode="fill", fill_value=0), axis)
    return jnp.where(ids < vocab_size(logits, axis), found, -jnp.inf)
