"""Linear projection and embedding; weights are stored [out, in] as checkpoints have them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from llmjax_kernels.native import blocks
from llmjax_kernels.packed import PackedWeight
from llmjax_kernels.quant_matmul import QuantWeight, quant_matmul, quant_rows


class Linear(nnx.Module):
    """y = x W^T + b, accumulated in float32, in x's dtype."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((out_size, in_size), dtype))
        self.bias = nnx.Param(jnp.zeros(out_size, dtype)) if bias else None

    def __call__(self, x: Float[Array, "*T in"]) -> Float[Array, "*T out"]:
        weight = self.weight.get_value()
        if isinstance(weight, PackedWeight):
            rows = x.reshape(-1, x.shape[-1])
            num_rows = jnp.full(1, len(rows), jnp.int32)
            y = blocks.linear(rows, blocks.Projection(weight), num_rows)
            y = y.reshape(*x.shape[:-1], -1)
        elif isinstance(weight, QuantWeight):
            y = quant_matmul(x, weight)
        else:
            y = project(x, self.weight[...]).astype(x.dtype)
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """Rows of a [V, D] table by token id."""

    def __init__(self, vocab_size: int, size: int, *, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((vocab_size, size), dtype))
        self.dtype = dtype

    def __call__(self, tokens: Int[Array, "*T"]) -> Float[Array, "*T D"]:
        weight = self.weight.get_value()
        if isinstance(weight, PackedWeight):
            rows = blocks.embed(tokens.reshape(-1), weight)
            return rows.reshape(*tokens.shape, -1)
        if isinstance(weight, QuantWeight):
            return quant_rows(weight, tokens).astype(self.dtype)
        return weight[tokens]


def project(x: Float[Array, "*T in"], weight: Float[Array, "out in"]) -> Float[Array, "*T out"]:
    """x W^T in float32."""
    return jax.lax.dot_general(
        x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
