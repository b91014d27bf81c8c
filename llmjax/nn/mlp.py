"""Gated feed-forward block (Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .linear import Linear

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class GatedMLP(nnx.Module):
    """down(activation(gate x) * up x)."""

    def __init__(
        self, hidden_size: int, mlp_size: int, activation: str, *, bias: bool, dtype: jnp.dtype
    ):
        self.gate = Linear(hidden_size, mlp_size, bias=bias, dtype=dtype)
        self.up = Linear(hidden_size, mlp_size, bias=bias, dtype=dtype)
        self.down = Linear(mlp_size, hidden_size, bias=bias, dtype=dtype)
        self.activation = activation

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))
