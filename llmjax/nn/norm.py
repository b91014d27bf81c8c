"""Root-mean-square layer norm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, in float32; the result has x's dtype."""

    def __init__(self, size: int, eps: float):
        self.weight = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale * self.weight[...]).astype(x.dtype)
