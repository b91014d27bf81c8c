"""Where a decoder's parameters are in a folder as the hub has them, and what they are there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from ..errors import UnsupportedModelError
from ..models import FAMILIES, DecoderConfig
from ..models.weights import Source, plus_one


class Target(NamedTuple):
    """A tensor of the folder.

    Attributes:
        name: "model.layers.0.self_attn.q_proj.weight".
        members: paths of the parameters that it holds; several where a family fuses them.
        rows: of each, which rows of the tensor are its own.
        offset: what was taken off the values (Gemma's norms: 1).
    """

    name: str
    members: tuple[str, ...]
    rows: tuple[Int[np.ndarray, " rows"], ...]
    offset: float

    @property
    def module(self) -> str:
        """The name without ".weight" or ".bias"."""
        return self.name.rpartition(".")[0]

    def join(self, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
        """The tensor's float32 values, of the parameters by path."""
        parts = [np.asarray(parameters[path]) for path in self.members]
        joined = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), np.float32)
        for rows, part in zip(self.rows, parts, strict=True):
            joined[rows] = part
        return joined - np.float32(self.offset)

    def split(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """The inverse of `join`."""
        whole = values + np.float32(self.offset)
        return {path: whole[rows] for path, rows in zip(self.members, self.rows, strict=True)}


def hub_family(config: DecoderConfig) -> ModuleType:
    """The family that names the tensors.

    Raises:
        UnsupportedModelError: the hub has no such models.
    """
    name = config.architecture
    whole = re.sub("Model$", "ForCausalLM", name)
    for family in FAMILIES:
        if whole in family.ARCHITECTURES or name in getattr(family, "GGUF_ARCHITECTURES", ()):
            return family
    raise UnsupportedModelError(f"architecture {name!r} is none that is written as a hub's folder")


def layer_targets(
    config: DecoderConfig, index: int, shapes: Mapping[str, tuple[int, ...]]
) -> list[Target]:
    """The tensors of a layer.

    Args:
        shapes: of its parameters, by their paths within it.
    """
    table = hub_family(config).WEIGHTS
    sources = {path: table[f"layers.{{i}}.{path}"] for path in shapes}
    numbered = {
        path: Source(source.name.replace("{i}", str(index)), source.transform)
        for path, source in sources.items()
    }
    return targets_of(config, numbered, shapes)


def outer_targets(config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[Target]:
    """The tensors of no layer."""
    table = hub_family(config).WEIGHTS
    return targets_of(config, {path: table[path] for path in shapes}, shapes)


def targets_of(
    config: DecoderConfig, sources: Mapping[str, Source], shapes: Mapping[str, tuple[int, ...]]
) -> list[Target]:
    """The tensors of a table.

    Args:
        sources: of each parameter, by path.
        shapes: of the parameters.
    """
    named: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        named[source.name].append(path)
    return [_target(config, name, paths, sources, shapes) for name, paths in named.items()]


def _target(
    config: DecoderConfig,
    name: str,
    paths: Iterable[str],
    sources: Mapping[str, Source],
    shapes: Mapping[str, tuple[int, ...]],
) -> Target:
    """Transforms say which rows they take when they are given the rows' numbers."""
    members = tuple(paths)
    numbers = np.arange(sum(shapes[path][0] for path in members))
    transforms = [sources[path].transform for path in members]
    if transforms == [plus_one]:
        return Target(name, members, (numbers,), 1.0)
    rows = tuple(numbers if t is None else t(numbers, config) for t in transforms)
    return Target(name, members, rows, 0.0)


def as_stored(
    target: Target, parameters: Mapping[str, np.ndarray], dtype: np.dtype
) -> dict[str, Float[np.ndarray, "*S"]]:
    """What a reader of the folder has of a tensor in `dtype`, float32 by path."""
    return target.split(target.join(parameters).astype(dtype).astype(np.float32))
