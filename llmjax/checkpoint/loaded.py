"""A model whose parameters are on the devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from llmjax_kernels.kv_format import KVFormat
from llmjax_kernels.native.blocks import unpack
from llmjax_kernels.packed import PackedWeight
from llmjax_kernels.quant_matmul import QuantWeight

from ..models import DecoderConfig
from ..parallel.mesh import Place
from ..tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory.

    Attributes:
        config: with the heads and channels that there are, those added to divide them included.
        mesh: of the devices that it is spread over; None is a single one.
        dtype: of activations.
        kv_format: how to keep keys and values, unless asked otherwise.
        weight_type: of the weights, for people.
        native: the weights are packed for the native CPU kernels.
        generation_defaults: sampling values that the model's authors chose, by the names of
            SamplingParams' fields; only those they gave.
        stages: its parts, where it is cut into several (`Stage`); `state` is that of all.
        layers: that are in a part; None is all.
        kv_copies: how often each key-value head is there; see `parallel/partition.py`.
        kv_queries: query heads of one in the checkpoint, whose copies have them together.
    """

    config: DecoderConfig
    mesh: Mesh | None
    graphdef: nnx.GraphDef
    state: nnx.State
    dtype: jnp.dtype
    kv_format: KVFormat
    weight_type: str
    native: bool
    tokenizer: Tokenizer
    generation_defaults: dict[str, float]
    stages: tuple[LoadedModel, ...] = ()
    layers: range | None = None
    kv_copies: int = 1
    kv_queries: int = 1

    @property
    def parts(self) -> tuple[LoadedModel, ...]:
        """Its stages; itself where it is whole."""
        return self.stages or (self,)

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take; arrays that several share count once."""
        return sum({id(x): x.nbytes for x in jax.tree.leaves(self.state)}.values())

    @property
    def device_bytes(self) -> int:
        """What of them the first device has."""
        arrays = {id(x): x for x in jax.tree.leaves(self.state)}.values()
        return sum(x.addressable_shards[0].data.nbytes for x in arrays)

    @property
    def place(self) -> Place:
        """Where it is."""
        leaf = jax.tree.leaves(self.state)[0]
        device = next(iter(leaf.sharding.device_set)) if self.mesh is None else self.mesh.devices[0]
        return Place(device, self.mesh)

    def on(self, place: Place) -> LoadedModel:
        """The same on other devices, copied from these and not read again."""
        copies: dict[int, jax.Array] = {}

        def copy(array: jax.Array, sharding: Sharding) -> jax.Array:
            """Arrays that several leaves share stay one."""
            if id(array) not in copies:
                copies[id(array)] = jax.device_put(array, sharding)
            return copies[id(array)]

        move = partial(moved, place=place, copy=copy)
        return replace(
            self, mesh=place.mesh, state=jax.tree.map(move, self.state, is_leaf=_is_packed)
        )

    def differentiable_state(self) -> nnx.State:
        """`state` with copies of packed weights (float32) and of quantised ones (`dtype`), as
        gradients are of plain arrays."""
        if not has_packed(self.state):
            return self.state
        # In one program: by itself each weight would be compiled for.
        unpacked = partial(_unpacked, dtype=self.dtype)
        return jax.jit(partial(jax.tree.map, unpacked, is_leaf=_is_packed))(self.state)


def moved(value: Any, place: Place, copy: Callable[[jax.Array, Sharding], jax.Array]) -> Any:
    """A parameter elsewhere, laid out alike.

    Args:
        value: an array, or a packed or quantised weight.
        copy: of an array, to a layout.
    """
    value = jax.tree.map(lambda array: copy(array, place.sharding(_spec_of(array))), value)
    if isinstance(value, QuantWeight) and value.layout is not None:
        assert place.mesh is not None
        return replace(value, layout=NamedSharding(place.mesh, value.layout.spec))
    return value


def _spec_of(array: jax.Array) -> PartitionSpec:
    """How an array is spread over its mesh."""
    sharding = array.sharding
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def has_packed(state: nnx.State) -> bool:
    """Whether some weights are kept as kernels of their own read them."""
    return any(map(_is_packed, jax.tree.leaves(state, is_leaf=_is_packed)))


def _is_packed(leaf: object) -> bool:
    return isinstance(leaf, PackedWeight | QuantWeight)


def _unpacked(leaf: jax.Array | PackedWeight | QuantWeight, dtype: jnp.dtype) -> jax.Array:
    if isinstance(leaf, QuantWeight):
        return leaf.dequantise().astype(dtype)
    return unpack(leaf) if isinstance(leaf, PackedWeight) else leaf
