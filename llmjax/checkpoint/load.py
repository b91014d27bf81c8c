"""From a path to a decoder's parameters on the devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from tqdm.auto import tqdm

from llmjax_kernels.kv_format import KV_FORMATS
from llmjax_kernels.packed import PackedWeight
from llmjax_kernels.quant_matmul import QuantWeight
from llmjax_kernels.triton_call import available as triton_available

from ..config import check_weight_types
from ..errors import ConfigError
from ..models import DecoderConfig, EncoderConfig, Stage, make_model
from ..models.weights import WeightTable
from ..parallel.mesh import Place
from ..parallel.partition import Partition, Sizes, partition
from ..parallel.rules import logical_axes, parameter_sharding
from ..parallel.stages import stage_layers, stage_of
from .architecture import require_decoder
from .arrays import array_from_tensor, array_from_values
from .base import FLOAT_TYPES, Checkpoint
from .detect import open_checkpoint
from .dividing import mlp_unit
from .loaded import LoadedModel, has_packed, moved
from .packing import Packer, Packing
from .plan import Use, plan_weights
from .quantising import Quantiser
from .serving_kernels import check_served, native_obstacle, runs_native

ShardingOf = Callable[[str, tuple[int, ...]], Sharding]
"""A parameter's layout, by its path and shape."""


class Weights(NamedTuple):
    """A decoder as `nnx.merge(graphdef, state)` takes it."""

    graphdef: nnx.GraphDef
    state: nnx.State


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    mesh: Mesh | None = None,
    stages: Sequence[Place] = (),
    check: Callable[[DecoderConfig, bool], None] | None = None,
    page_size: int | None = None,
    progress: bool = True,
) -> LoadedModel:
    """Loads what `resolve_model` found: a GGUF file, a safetensors or an orbax folder.

    Args:
        dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's own type. What is
            quantised stays so where native kernels run it, or Triton's on NVIDIA GPUs; else
            "auto" means bfloat16 for it on an accelerator. XLA on a CPU takes float32, as its
            bfloat16 dot is slow.
        quantization: "int8", "int4" or "fp8": float matrices are quantised; the first two for
            the native kernels and for Triton's on an NVIDIA GPU, "fp8" for the latter.
        mesh: lays parameters out by `llmjax.parallel.rules`; None takes the first device.
        stages: cuts the model into as many, each of which is laid out over the mesh of its place.
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
    if stages:
        mesh = stages[0].mesh
    is_one = mesh is None and len(stages) < 2
    obstacle = None if page_size is None else native_obstacle(config, dtype, page_size, is_one)
    native = page_size is not None and runs_native(obstacle)
    triton = triton_available()
    if quantization:
        check_served(quantization, native, triton, obstacle)
    if check is not None:
        check(config, native)
    text = checkpoint.read_text_side()
    _give_back_freed_memory()
    if native:
        chosen = jnp.dtype(jnp.float32)
        packing = Packing(None if dtype == "auto" else jnp.dtype(dtype), quantization)
    else:
        chosen, packing = plain_dtype(dtype, checkpoint, table), None
        if quantization and chosen.itemsize > 2:
            chosen = jnp.dtype(jnp.bfloat16)  # of activations
    keep_codes = dtype == "auto" and (native or triton)
    round_inputs = not native and not quantization
    rounded = any(m.inputs is not None for m in checkpoint.matrices.values())

    places = stages or (Place(jax.local_devices()[0], mesh),)
    layers = stage_layers(config.num_layers, len(places), config.head_in_layers)

    def sharding_of(path: str, shape: tuple[int, ...]) -> Sharding:
        place = places[stage_of(path, layers)]
        if place.mesh is None:
            return SingleDeviceSharding(place.device)
        return parameter_sharding(path, shape, place.mesh)

    unit = 1
    if mesh is not None and (quantization or keep_codes or rounded):
        unit = mlp_unit(checkpoint, config, table, quantization)
    divided, parts = _divide(config, mesh, unit)
    weights = load_weights(
        checkpoint,
        config,
        table,
        chosen,
        sharding_of,
        parts=parts,
        packing=packing,
        quantization=None if native else quantization,
        keep_codes=keep_codes,
        round_inputs=round_inputs,
        progress=progress,
    )
    model = LoadedModel(
        config=divided,
        kv_copies=1 if parts is None else parts.kv_copies,
        kv_queries=config.num_heads // config.num_kv_heads,
        mesh=mesh,
        graphdef=weights.graphdef,
        state=weights.state,
        dtype=chosen,
        # Keys and values of a model that is itself in 16 bits or fewer lose nothing by that.
        kv_format=KV_FORMATS[
            checkpoint.kv_code or ("bfloat16" if native and dtype != "float32" else chosen.name)
        ],
        weight_type=_weight_type(
            checkpoint, weights, chosen, quantization, keep_codes or (round_inputs and rounded)
        ),
        native=native,
        tokenizer=text.tokenizer,
        generation_defaults=text.generation_defaults,
    )
    return model if len(places) == 1 else replace(model, stages=cut(model, places, layers))


def _weight_type(
    checkpoint: Checkpoint,
    weights: Weights,
    dtype: jnp.dtype,
    quantization: str | None,
    kept: bool,
) -> str:
    """See `LoadedModel`; `kept` are codes, where there are some."""
    codings = ", ".join(sorted({m.coding.name for m in checkpoint.matrices.values()}))
    if quantization:
        return f"{codings and f'{codings}, others '}quantised to {quantization}"
    if codings:
        return codings if kept else f"{dtype.name} from {codings}"
    return "as stored" if kept and has_packed(weights.state) else dtype.name


def cut(
    model: LoadedModel, places: Sequence[Place], layers: Sequence[range]
) -> tuple[LoadedModel, ...]:
    """The stages of a model whose parameters are in their places."""
    arrays = {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(model.state)}
    stages = []
    for place, some in zip(places, layers, strict=True):
        graphdef, leaves = _parameters(partial(Stage, model.config, model.dtype, some))
        state = []
        for path, (keys, leaf) in leaves.items():
            # What is of two stages, the embedding that is the head too, is copied to the second.
            value = moved(arrays[_in_decoder(path, some.start)], place, jax.device_put)
            state.append((keys, leaf.replace(value)))
        made = nnx.from_flat_state(state)
        stages.append(replace(model, mesh=place.mesh, graphdef=graphdef, state=made, layers=some))
    return tuple(stages)


def _in_decoder(path: str, first_layer: int) -> str:
    """A stage's parameter among those of the decoder."""
    part, _, rest = path.partition(".")
    if part != "layers":
        return path
    layer, _, rest = rest.partition(".")
    return f"layers.{int(layer) + first_layer}.{rest}"


def _divide(
    config: DecoderConfig, mesh: Mesh | None, mlp_unit: int
) -> tuple[DecoderConfig, Partition | None]:
    """The model as tensor parallelism divides it."""
    if mesh is None:
        return config, None
    sizes = Sizes(config.num_heads, config.num_kv_heads, config.head_dim, config.mlp_size)
    parts = partition(sizes, mesh.shape["tensor"], mlp_unit)
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
    quantization: str | None = None,
    keep_codes: bool = False,
    round_inputs: bool = False,
    progress: bool = True,
) -> Weights:
    """Builds each parameter straight in its (sharded) array, tensor by tensor.

    Norm weights stay float32; others are rounded to `dtype`, but for matrices if `packing`
    says how to pack them for CPUs, or `quantization` how to quantise them for GPUs.

    Args:
        config: what the checkpoint has.
        keep_codes: what is quantised already stays so for GPUs, where a kernel reads it.
        round_inputs: so do matrices whose scheme has the other factor of products rounded too,
            for any device.
        parts: how it is dealt out to devices; None takes it as it is.

    Raises:
        WeightMismatchError: tensors are missing, unknown or of the wrong shape; names all.
        UnsupportedModelError: a needed tensor's type cannot be read.
    """
    graphdef, leaves = _parameters(lambda: make_model(config, dtype))
    stored = {path: leaf for path, (_, leaf) in leaves.items()}
    if parts is not None:
        divided = replace(config, **parts.sizes._asdict())
        graphdef, leaves = _parameters(lambda: make_model(divided, dtype))
    wanted = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(path, leaf.shape))
        for path, (_, leaf) in leaves.items()
    }
    plan = plan_weights(checkpoint, config, table, stored)
    packer: Packer | Quantiser | None = None
    if packing:
        assert isinstance(config, DecoderConfig)
        packer = Packer(checkpoint, config, plan, wanted, packing)
    elif quantization or keep_codes or round_inputs:
        assert isinstance(config, DecoderConfig)
        packer = Quantiser(
            checkpoint,
            config,
            plan,
            wanted,
            quantization,
            only_rounded=not keep_codes,
            sources={} if parts is None else parts.sources,
        )
    arrays: dict[str, jax.Array | PackedWeight | QuantWeight] = {}
    total = sum(w.size for w in wanted.values())
    with tqdm(
        total=total, desc="loading weights", unit=" weights", unit_scale=True, disable=not progress
    ) as bar:
        for name, uses in plan.items():
            if packer and name in packer.tensors:
                packer.add(name, uses)
            else:
                arrays |= _fill(checkpoint, name, uses, config, wanted, parts)
            bar.update(sum(wanted[use.path].size for use in uses))
    if packer:
        arrays |= packer.done()
    state = [(keys, leaf.replace(arrays[path])) for path, (keys, leaf) in leaves.items()]
    return Weights(graphdef, nnx.from_flat_state(state))


def _parameters(make: Callable[[], Any]) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """A model without arrays: the place in its state and the shape of each, by path."""
    graphdef, abstract = nnx.split(nnx.eval_shape(make))
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
