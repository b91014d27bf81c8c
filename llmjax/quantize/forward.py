"""One decoder layer over many sequences, and what its linear layers are given."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from llmjax_kernels.quant_matmul import InputFormat, round_rows

from ..models.config import DecoderConfig
from ..models.decoder import DecoderLayer
from ..nn.attention import DenseContext
from ..nn.linear import Linear
from ..nn.rope import Rotation, rotation

TOKENS_AT_ONCE = 4096
"""Rows that a program computes: enough for its products, few enough for their memory."""

Roundings = tuple[tuple[str, InputFormat], ...]
"""By linear layer ("attn.q")."""


class Tap(nnx.Module):
    """Takes a linear layer's place, notes its input and rounds it first if asked."""

    def __init__(self, inner: Linear, rounding: InputFormat | None, static: Array | None):
        self.inner, self.rounding, self.static = inner, rounding, static
        self.seen: Any = nnx.data(None)

    def __call__(self, x: Float[Array, "T in"]) -> Float[Array, "T out"]:
        self.seen = x
        if self.rounding is not None:
            x = round_rows(x, self.rounding, self.static)
        return self.inner(x)


def like(config: DecoderConfig, index: int) -> int:
    """The first layer that computes as this one does: one program serves both."""
    kinds = list(zip(config.windows, config.ropes, strict=True))
    return kinds.index(kinds[index])


def sequences_at_once(count: int, length: int) -> int:
    """The greatest divisor of `count` whose sequences are no more than `TOKENS_AT_ONCE`."""
    most = max(1, TOKENS_AT_ONCE // length)
    return max(n for n in range(1, min(most, count) + 1) if count % n == 0)


@partial(jax.jit, static_argnames=("config", "index", "watched", "roundings", "ends"))
def run_layer(
    parameters: Mapping[str, Array],
    static: Mapping[str, Array],
    x: Float[Array, "B T D"],
    *,
    config: DecoderConfig,
    index: int,
    watched: tuple[str, ...] = (),
    roundings: Roundings = (),
    ends: bool = True,
) -> tuple[Float[Array, "B T D"] | None, dict[str, Float[Array, "B T K"]]]:
    """The layer's output, and the inputs of the linear layers `watched`.

    Args:
        parameters: of the layer, float32, by path.
        static: scale and zero point of static roundings, by linear layer.
        index: of a layer that computes alike (`like`).
        roundings: of linear layers whose inputs are rounded.
        ends: whether the output is wanted; if not, nothing is computed that `watched` need not.
    """
    abstract = nnx.eval_shape(lambda: DecoderLayer(config, index, jnp.dtype(jnp.float32)))
    graphdef, state = nnx.split(abstract)
    leaves = [
        (keys, leaf.replace(parameters[".".join(map(str, keys))]))
        for keys, leaf in nnx.to_flat_state(state)
    ]
    rope = layer_rotation(config, index, x.shape[1])
    wanted = dict(roundings)

    def one(sequence: Float[Array, "T D"]) -> tuple[Array | None, dict[str, Array]]:
        layer = nnx.merge(graphdef, nnx.from_flat_state(leaves))
        taps = {}
        for name in {*watched, *wanted}:
            block, part = name.split(".")
            holder = getattr(layer, block)
            taps[name] = Tap(getattr(holder, part), wanted.get(name), static.get(name))
            setattr(holder, part, taps[name])
        out = layer(sequence, rope, 0, DenseContext())
        return out if ends else None, {name: taps[name].seen for name in watched}

    with jax.default_matmul_precision("float32"):
        return jax.vmap(one)(x)


def layer_rotation(config: DecoderConfig, index: int, length: int) -> Rotation:
    """The angles of a sequence's positions."""
    positions = jnp.arange(length, dtype=jnp.int32)
    return rotation(config.ropes[index], positions, jnp.full(length, length, jnp.int32))


def embed(
    table: np.ndarray, tokens: np.ndarray, config: DecoderConfig
) -> Float[np.ndarray, "S T D"]:
    """What the first layer is given, float32."""
    return table[tokens] * np.float32(config.embed_scale)
