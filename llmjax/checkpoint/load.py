"""From a path to a decoder's parameters on the devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from tqdm.auto import tqdm

from llmjax_kernels.kv_format import KV_FORMATS, KVFormat
from llmjax_kernels.native import available as native_available
from llmjax_kernels.native.blocks import supports as native_supports
from llmjax_kernels.native.blocks import unpack
from llmjax_kernels.packed import PackedWeight

from ..config import check_weight_types
from ..errors import ConfigError
from ..models import DecoderConfig, EncoderConfig, make_model
from ..models.weights import WeightTable
from ..parallel.partition import Partition, Sizes, partition
from ..parallel.rules import logical_axes, parameter_sharding
from ..tokenizer import Tokenizer
from .architecture import require_decoder
from .arrays import array_from_tensor, array_from_values
from .base import FLOAT_TYPES, Checkpoint
from .detect import open_checkpoint
from .packing import Packer, Packing
from .plan import Use, plan_weights

ShardingOf = Callable[[str, tuple[int, ...]], Sharding]
"""A parameter's layout, by its path and shape."""


class Weights(NamedTuple):
    """A decoder as `nnx.merge(graphdef, state)` takes it."""

    graphdef: nnx.GraphDef
    state: nnx.State


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

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take; arrays that several share count once."""
        return sum({id(x): x.nbytes for x in jax.tree.leaves(self.state)}.values())

    @property
    def device_bytes(self) -> int:
        """What of them the first device has."""
        arrays = {id(x): x for x in jax.tree.leaves(self.state)}.values()
        return sum(x.addressable_shards[0].data.nbytes for x in arrays)

    def differentiable_state(self) -> nnx.State:
        """`state` with float32 copies of packed weights, as gradients are of plain arrays."""
        if not self.native:
            return self.state
        # In one program: by itself each weight would be compiled for.
        return jax.jit(partial(jax.tree.map, _unpacked, is_leaf=_is_packed))(self.state)


def _is_packed(leaf: object) -> bool:
    return isinstance(leaf, PackedWeight)


def _unpacked(leaf: jax.Array | PackedWeight) -> jax.Array:
    return unpack(leaf) if isinstance(leaf, PackedWeight) else leaf


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    mesh: Mesh | None = None,
    check: Callable[[DecoderConfig, bool], None] | None = None,
    page_size: int | None = None,
    progress: bool = True,
) -> LoadedModel:
    """Loads what `resolve_model` found: a GGUF file, a safetensors or an orbax folder.

    Args:
        dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's own type. What is
            quantised stays so where native kernels run it, else "auto" means bfloat16 for it
            on an accelerator. XLA on a CPU takes float32, as its bfloat16 dot is slow.
        quantization: "int8" or "int4": float matrices are quantised for the native kernels.
        mesh: lays parameters out by `llmjax.parallel.rules`; None takes the first device.
        page_size: of the KV pages that a step will use; the native CPU kernels serve where
            they know it and the model's shape. None leaves weights as plain arrays.
        check: sees what the model is, and whether native kernels will serve it, before its
            weights are read, and may refuse it.
        progress: show a progress bar on stderr.

    Raises:
        ModelLoadError: the subclass says what is wrong; names, shapes and types are all
            checked before anything big is allocated.
        ConfigError: `dtype` is none of these, or `quantization` cannot be had.
    """
    check_weight_types(dtype, quantization)
    checkpoint = open_checkpoint(path)
    found, table = checkpoint.read_architecture()
    config = require_decoder(found)
    native = page_size is not None and _runs_native(config, dtype, mesh, page_size)
    if quantization and not native:
        raise ConfigError(
            f"quantization is {quantization!r}: only the native CPU kernels take it, and XLA "
            "serves here"
        )
    if check is not None:
        check(config, native)
    text = checkpoint.read_text_side()
    _give_back_freed_memory()
    if native:
        chosen = jnp.dtype(jnp.float32)
        packing = Packing(None if dtype == "auto" else jnp.dtype(dtype), quantization)
    else:
        chosen, packing = plain_dtype(dtype, checkpoint, table), None

    def sharding_of(path: str, shape: tuple[int, ...]) -> Sharding:
        if mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0])
        return parameter_sharding(path, shape, mesh)

    divided, parts = _divide(config, mesh)
    weights = load_weights(
        checkpoint,
        config,
        table,
        chosen,
        sharding_of,
        parts=parts,
        packing=packing,
        progress=progress,
    )
    stored = "as stored" if native and dtype == "auto" else chosen.name
    return LoadedModel(
        config=divided,
        mesh=mesh,
        graphdef=weights.graphdef,
        state=weights.state,
        dtype=chosen,
        # Keys and values of a model that is itself in 16 bits or fewer lose nothing by that.
        kv_format=KV_FORMATS["bfloat16" if native and dtype != "float32" else chosen.name],
        weight_type=f"quantised to {quantization}" if quantization else stored,
        native=native,
        tokenizer=text.tokenizer,
        generation_defaults=text.generation_defaults,
    )


def _divide(config: DecoderConfig, mesh: Mesh | None) -> tuple[DecoderConfig, Partition | None]:
    """The model as tensor parallelism divides it."""
    if mesh is None:
        return config, None
    sizes = Sizes(config.num_heads, config.num_kv_heads, config.head_dim, config.mlp_size)
    parts = partition(sizes, mesh.shape["tensor"])
    if config.qk_norm == "full" and parts.sources.keys() & {"heads", "kv_heads"}:
        raise ConfigError(
            f"tensor_parallel_size is {mesh.shape['tensor']}, allowed for {config.architecture}: "
            f"what divides its {config.num_kv_heads} key-value heads, over all of which it norms"
        )
    return replace(config, **parts.sizes._asdict()), parts


def _give_back_freed_memory() -> None:
    """To the system, before weights need it: building a large tokenizer leaves 40 MB behind."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if trim:
        trim(0)


def _runs_native(config: DecoderConfig, dtype: str, mesh: Mesh | None, page_size: int) -> bool:
    if dtype == "float16" or mesh is not None:
        return False
    return native_available() and native_supports(config.head_dim, page_size)


def plain_dtype(dtype: str, checkpoint: Checkpoint, table: WeightTable | None) -> jnp.dtype:
    if dtype != "auto":
        return jnp.dtype(dtype)
    if jax.default_backend() == "cpu":
        return jnp.dtype(jnp.float32)
    return own_dtype(checkpoint, table) or jnp.dtype(jnp.bfloat16)


def own_dtype(checkpoint: Checkpoint, table: WeightTable | None) -> jnp.dtype | None:
    """The type that the weights are stored in, by the embedding's; None if quantised."""
    name = table["embed.weight"].name if table else "embed.weight"
    info = checkpoint.tensors.get(name)
    return FLOAT_TYPES.get(info.type_name) if info else None


def load_weights(
    checkpoint: Checkpoint,
    config: DecoderConfig | EncoderConfig,
    table: WeightTable | None,
    dtype: jnp.dtype,
    sharding_of: ShardingOf,
    *,
    parts: Partition | None = None,
    packing: Packing | None = None,
    progress: bool = True,
) -> Weights:
    """Builds each parameter straight in its (sharded) array, tensor by tensor.

    Norm weights stay float32; others are rounded to `dtype`, but for matrices if `packing`
    says how to pack them.

    Args:
        config: what the checkpoint has.
        parts: how it is dealt out to devices; None takes it as it is.

    Raises:
        WeightMismatchError: tensors are missing, unknown or of the wrong shape; names all.
        UnsupportedModelError: a needed tensor's type cannot be read.
    """
    graphdef, leaves = _parameters(config, dtype)
    stored = {path: leaf for path, (_, leaf) in leaves.items()}
    if parts is not None:
        graphdef, leaves = _parameters(replace(config, **parts.sizes._asdict()), dtype)
    wanted = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(path, leaf.shape))
        for path, (_, leaf) in leaves.items()
    }
    plan = plan_weights(checkpoint, config, table, stored)
    packer = None
    if packing:
        assert isinstance(config, DecoderConfig)
        packer = Packer(checkpoint, config, plan, wanted, packing)
    arrays: dict[str, jax.Array | PackedWeight] = {}
    total = sum(w.size * w.dtype.itemsize for w in wanted.values())
    with tqdm(
        total=total, desc="loading weights", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        for name, uses in plan.items():
            if packer and name in packer.tensors:
                packer.add(name, uses)
            else:
                arrays |= _fill(checkpoint, name, uses, config, wanted, parts)
            bar.update(sum(wanted[use.path].size * wanted[use.path].dtype.itemsize for use in uses))
    if packer:
        arrays |= packer.done()
    state = [(keys, leaf.replace(arrays[path])) for path, (keys, leaf) in leaves.items()]
    return Weights(graphdef, nnx.from_flat_state(state))


def _parameters(
    config: DecoderConfig | EncoderConfig, dtype: jnp.dtype
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """A model without arrays: the place in its state and the shape of each, by path."""
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: make_model(config, dtype)))
    flat = nnx.to_flat_state(abstract)
    return graphdef, {".".join(map(str, keys)): (keys, leaf) for keys, leaf in flat}


def _fill(
    checkpoint: Checkpoint,
    name: str,
    uses: list[Use],
    config: DecoderConfig | EncoderConfig,
    wanted: dict[str, jax.ShapeDtypeStruct],
    parts: Partition | None,
) -> dict[str, jax.Array]:
    """The parameters that one tensor fills, by path."""
    path, transform = uses[0]
    sources = {} if parts is None else parts.sources
    if len(uses) == 1 and transform is None and not sources.keys() & set(logical_axes(path)):
        return {
            path: array_from_tensor(checkpoint, name, wanted[path].dtype, wanted[path].sharding)
        }
    stored = checkpoint.read(name)
    filled = {}
    for path, transform in uses:
        values = stored if transform is None else transform(stored, config)
        filled[path] = array_from_values(
            values,
            wanted[path].dtype,
            wanted[path].sharding,
            [sources.get(axis or "") for axis in logical_axes(path)],
        )
    return filled
