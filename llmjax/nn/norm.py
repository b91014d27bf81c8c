"""Layer norms: root mean square (Zhang and Sennrich, 2019) and the first (Ba et al., 2016)."""

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


class LayerNorm(nnx.Module):
    """(x - mean) / std * weight + bias over the last axis, in float32; the result has x's dtype."""

    def __init__(self, size: int, eps: float):
        self.weight = nnx.Param(jnp.ones(size, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        return (centred * scale * self.weight[...] + self.bias[...]).astype(x.dtype)
