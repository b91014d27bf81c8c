"""What a GGUF file is made of: metadata, and tensors under its names, from any checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..checkpoint import Checkpoint, TensorInfo
from ..checkpoint.gguf_file import GGUFCheckpoint, gguf_metadata
from ..checkpoint.gguf_header import Metadata
from ..checkpoint.gguf_write import Value, typed
from ..checkpoint.text import METADATA
from ..models.weights import Source as TensorSource
from ..tokenizer import gguf_tokenizer
from .gguf_keys import gguf_family, gguf_keys, require_alike, rope_tensors
from .hub import Target, targets_of
from .source import Source

_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_NOT_CARRIED = ("split.no", "split.count", "split.tensors.count", "general.alignment")
"""Keys of a file that are of how it lies on the disk."""


@dataclass(frozen=True)
class GgufModel:
    """A decoder as a GGUF file has it.

    Attributes:
        metadata: but for what says how it is quantised.
        shapes: of the tensors, in the file's order.
        values: of a tensor, in any float type.
        name_of: a parameter's path -> the tensor that it is in.
    """

    metadata: Mapping[str, Value]
    shapes: Mapping[str, tuple[int, ...]]
    values: Callable[[str], np.ndarray]
    name_of: Callable[[str], str | None]


def gguf_model(checkpoint: Checkpoint, source: Source) -> GgufModel:
    """The model of a checkpoint. A GGUF file's tensors and metadata are carried over.

    Raises:
        UnsupportedModelError: its family or its tokenizer cannot be written as GGUF.
    """
    targets = _targets(source)
    names = {path: target.name for target in targets.values() for path in target.members}
    if isinstance(checkpoint, GGUFCheckpoint):
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
        return GgufModel(_carried(checkpoint.config), shapes, checkpoint.read, names.get)
    ropes = rope_tensors(source.config)
    shapes = {name: value.shape for name, value in ropes.items()}
    shapes |= {name: _shape(target, source) for name, target in targets.items()}

    def values(name: str) -> np.ndarray:
        if name in ropes:
            return ropes[name]
        return targets[name].join(source.read(targets[name].members))

    infos = {name: TensorInfo(shape, "F32") for name, shape in shapes.items()}
    return GgufModel(_metadata(checkpoint, source, infos), shapes, values, names.get)


def _targets(source: Source) -> dict[str, Target]:
    """The tensors that parameters are in, by name."""
    table = gguf_family(source.config)[1].GGUF_WEIGHTS
    sources = {}
    for path in source.shapes:
        layer = re.match(r"layers\.(\d+)\.", path)
        found = table[path if layer is None else f"layers.{{i}}.{path[layer.end() :]}"]
        name = found.name if layer is None else found.name.replace("{i}", layer[1])
        sources[path] = TensorSource(name, found.transform)
    return {t.name: t for t in targets_of(source.config, sources, source.shapes)}


def _shape(target: Target, source: Source) -> tuple[int, ...]:
    shapes = [source.shapes[path] for path in target.members]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _metadata(
    checkpoint: Checkpoint, source: Source, tensors: Mapping[str, TensorInfo]
) -> dict[str, Value]:
    kept = checkpoint.path / METADATA
    if kept.exists():  # of a GGUF file that `llmjax convert` took
        carried = gguf_metadata(kept)
        require_alike(carried, source.config, tensors)
        return _carried(carried)
    text = checkpoint.read_text_side()
    plain = gguf_keys(source.config, tensors)
    plain |= {"general.type": "model", "general.name": checkpoint.path.resolve().name}
    for name, value in text.generation_defaults.items():
        plain[f"general.sampling.{_SAMPLING[name]}"] = (
            int(value) if name == "top_k" else float(value)
        )
    plain |= gguf_tokenizer(text.tokenizer, source.config.vocab_size)
    return {key: typed(value) for key, value in plain.items()}


def _carried(metadata: Metadata) -> dict[str, Value]:
    return {
        key: Value(metadata[key], *metadata.types(key))
        for key in metadata
        if key not in _NOT_CARRIED
    }
