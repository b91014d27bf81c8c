"""From a path to a decoder's parameters on the devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from tqdm.auto import tqdm

from ..config import DTYPES
from ..errors import ConfigError
from ..models import Decoder
from ..models.config import DecoderConfig
from ..models.weights import WeightTable
from ..parallel.rules import parameter_sharding
from ..tokenizer import Tokenizer
from .arrays import array_from_tensor, array_from_values
from .base import FLOAT_TYPES, Checkpoint
from .detect import open_checkpoint
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
        dtype: of all weights but norms, which are float32.
        generation_defaults: sampling values that the model's authors chose, by the names of
            SamplingParams' fields; only those they gave.
    """

    config: DecoderConfig
    graphdef: nnx.GraphDef
    state: nnx.State
    dtype: jnp.dtype
    tokenizer: Tokenizer
    generation_defaults: dict[str, float]


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    check: Callable[[DecoderConfig], None] | None = None,
    progress: bool = True,
) -> LoadedModel:
    """Loads what `resolve_model` found: a GGUF file, a safetensors or an orbax folder.

    Args:
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU (XLA's bfloat16
            dot is several times slower there), else the checkpoint's own type, which is
            bfloat16 where it is quantised.
        mesh: lays parameters out by `llmjax.parallel.rules`; None takes the first device.
        check: sees what the model is before its weights are read, and may refuse it.
        progress: show a progress bar on stderr.

    Raises:
        ModelLoadError: the subclass says what is wrong; names, shapes and types are all
            checked before anything big is allocated.
        ConfigError: `dtype` is none of these.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, allowed: {', '.join(DTYPES)}")
    checkpoint = open_checkpoint(path)
    config, table = checkpoint.read_architecture()
    if check is not None:
        check(config)
    text = checkpoint.read_text_side()
    _give_back_freed_memory()
    if dtype == "auto" and jax.default_backend() != "cpu":
        chosen = own_dtype(checkpoint, table) or jnp.dtype(jnp.bfloat16)
    else:
        chosen = jnp.dtype(jnp.float32 if dtype == "auto" else dtype)

    def sharding_of(path: str, shape: tuple[int, ...]) -> Sharding:
        if mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0])
        return parameter_sharding(path, shape, mesh)

    weights = load_weights(checkpoint, config, table, chosen, sharding_of, progress=progress)
    return LoadedModel(
        config=config,
        graphdef=weights.graphdef,
        state=weights.state,
        dtype=chosen,
        tokenizer=text.tokenizer,
        generation_defaults=text.generation_defaults,
    )


def _give_back_freed_memory() -> None:
    """To the system, before weights need it: building a large tokenizer leaves 40 MB behind."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if trim:
        trim(0)


def own_dtype(checkpoint: Checkpoint, table: WeightTable | None) -> jnp.dtype | None:
    """The type that the weights are stored in, by the embedding's; None if quantised."""
    name = table["embed.weight"].name if table else "embed.weight"
    info = checkpoint.tensors.get(name)
    return FLOAT_TYPES.get(info.type_name) if info else None


def load_weights(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    table: WeightTable | None,
    dtype: jnp.dtype,
    sharding_of: ShardingOf,
    *,
    progress: bool = True,
) -> Weights:
    """Builds each parameter straight in its (sharded) array, tensor by tensor.

    Norm weights stay float32; others are rounded to `dtype`.

    Raises:
        WeightMismatchError: tensors are missing, unknown or of the wrong shape; names all.
        UnsupportedModelError: a needed tensor's type cannot be read.
    """
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype)))
    leaves = {".".join(map(str, keys)): (keys, leaf) for keys, leaf in nnx.to_flat_state(abstract)}
    wanted = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(path, leaf.shape))
        for path, (_, leaf) in leaves.items()
    }
    plan = plan_weights(checkpoint, config, table, wanted)
    arrays: dict[str, jax.Array] = {}
    total = sum(w.size * w.dtype.itemsize for w in wanted.values())
    with tqdm(
        total=total, desc="loading weights", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        for name, uses in plan.items():
            filled = _fill(checkpoint, name, uses, config, wanted)
            arrays |= filled
            bar.update(sum(array.nbytes for array in filled.values()))
    state = [(keys, leaf.replace(arrays[path])) for path, (keys, leaf) in leaves.items()]
    return Weights(graphdef, nnx.from_flat_state(state))


def _fill(
    checkpoint: Checkpoint,
    name: str,
    uses: list[Use],
    config: DecoderConfig,
    wanted: dict[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
    """The parameters that one tensor fills, by path."""
    path, transform = uses[0]
    if len(uses) == 1 and transform is None:
        return {
            path: array_from_tensor(checkpoint, name, wanted[path].dtype, wanted[path].sharding)
        }
    stored = checkpoint.read(name)
    filled = {}
    for path, transform in uses:
        values = stored if transform is None else transform(stored, config)
        filled[path] = array_from_values(values, wanted[path].dtype, wanted[path].sharding)
    return filled
