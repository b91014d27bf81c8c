"""Checkpoints in orbax's format: parameters by their decoder paths, read shard by shard.

Layout of a folder that `llmjax convert` writes:

    llmjax.json       format version, and the decoder's configuration
    weights/          an orbax PyTree checkpoint (OCDBT of zarr arrays)
    config.json, generation_config.json, tokenizer files     of a safetensors model
    metadata.gguf     metadata of a GGUF model, tokenizer included, without tensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from ..errors import CheckpointFormatError
from ..models.config import DecoderConfig, RopeConfig
from .base import FLOAT_TYPES, Checkpoint, TensorInfo
from .detect import MARKER
from .gguf_file import gguf_metadata
from .json_file import read_json
from .text import METADATA, TextSide, text_from_gguf

WEIGHTS = "weights"
VERSION = 1
_CHUNK_BYTES, _LEAST_CHUNK_BYTES = 4 << 20, 1 << 20
_TYPE_NAMES = {dtype: name for name, dtype in FLOAT_TYPES.items()}


class OrbaxCheckpoint(Checkpoint):
    """A folder that `llmjax convert` wrote.

    Raises:
        CheckpointFormatError: a file is missing, damaged or of another format version.
    """

    def __init__(self, path: Path):
        self.path = path
        content = read_json(path / MARKER)
        if content.get("version") != VERSION:
            raise CheckpointFormatError(
                f"{path} was written by another llmjax (format {content.get('version')!r}, "
                f"this one reads {VERSION}); convert the model again"
            )
        self._config = _config_from_json(content["decoder"])
        self.tensors = _describe(path / WEIGHTS)
        self._context = ts.Context()

    def read_architecture(self) -> tuple[DecoderConfig, None]:
        return self._config, None

    def read_text_side(self) -> TextSide:
        if (self.path / METADATA).exists():
            return text_from_gguf(gguf_metadata(self.path / METADATA))
        return super().read_text_side()

    @property
    def readable_types(self) -> Mapping[str, np.dtype]:
        return FLOAT_TYPES

    def _open(self, name: str) -> ts.TensorStore:
        # The context keeps the opened store, so that opening again costs little.
        base = f"file://{(self.path / WEIGHTS).absolute()}/"
        store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        spec = {"driver": "zarr", "kvstore": store}
        return ts.open(spec, read=True, context=self._context).result()

    def block_rows(self, name: str) -> int:
        shape = self._open(name).chunk_layout.read_chunk.shape or (1,)
        chunk = shape[0] or 1
        return max(chunk, super().block_rows(name) // chunk * chunk)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._open(name)[start:stop].read().result()

    def read_columns(self, name: str, start: int, stop: int, columns: slice) -> np.ndarray:
        return self._open(name)[start:stop, columns].read().result()


def _handler() -> ocp.PyTreeCheckpointHandler:
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)


def _describe(weights: Path) -> dict[str, TensorInfo]:
    try:
        with ocp.Checkpointer(_handler()) as checkpointer:
            tree = checkpointer.metadata(weights.absolute()).item_metadata.tree
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointFormatError(
            f"{weights} is not a complete orbax checkpoint: {error}"
        ) from error
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        ".".join(key.key for key in keys): TensorInfo(
            tuple(leaf.shape), _TYPE_NAMES[np.dtype(leaf.dtype)]
        )
        for keys, leaf in leaves
    }


def write_orbax(folder: Path, config: DecoderConfig, arrays: Mapping[str, jax.Array]) -> None:
    """Writes llmjax.json and the weights into an empty folder."""
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *parents, leaf = path.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = array
    save_args = jax.tree.map(_chunked, tree)
    with ocp.Checkpointer(_handler()) as checkpointer:
        checkpointer.save(
            (folder / WEIGHTS).absolute(), args=ocp.args.PyTreeSave(tree, save_args=save_args)
        )
    content = {"version": VERSION, "decoder": asdict(config)}
    (folder / MARKER).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _chunked(array: jax.Array) -> ocp.SaveArgs:
    """Small chunks, so that a shard is read without its neighbours.

    orbax divides evenly: rows without a divisor of use stay in one chunk.
    """
    rows = array.shape[0]
    row_bytes = array.nbytes // max(1, rows)
    most = max(1, _CHUNK_BYTES // max(1, row_bytes))
    divisor = max(d for d in range(1, most + 1) if rows % d == 0)
    size = divisor * row_bytes
    return ocp.SaveArgs(chunk_byte_size=size if size >= _LEAST_CHUNK_BYTES else None)


def _config_from_json(content: dict[str, Any]) -> DecoderConfig:
    try:
        ropes = tuple(RopeConfig(**_tuples(rope)) for rope in content["ropes"])
        return DecoderConfig(**_tuples(content | {"ropes": ropes}))
    except (TypeError, KeyError) as error:
        raise CheckpointFormatError(
            f"{MARKER} has another llmjax's configuration: {error}"
        ) from error


def _tuples(content: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
