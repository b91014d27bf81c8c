"""safetensors checkpoints as the hub has them: config.json beside one or more files.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import CheckpointFormatError
from ..models import DecoderConfig, EncoderConfig
from ..models.weights import WeightTable
from ..quant import Matrices, Tensor, read_kv_code, read_matrices
from .architecture import architecture_from_hf, fitted
from .base import FLOAT_TYPES, TensorInfo
from .data_file import DataFile, FileCheckpoint, StoredTensor
from .json_file import read_json

_MAX_HEADER = 100_000_000  # as the format's own reader
CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SETTINGS = ("quantization_config", "compression_config")
"""What config.json calls what it says of how a folder is quantised, now and before."""
SEPARATE_SETTINGS = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files that say it where config.json does not: AutoGPTQ's, AutoAWQ's and ModelOpt's, which name no
method."""

_TYPES = FLOAT_TYPES | {
    "BOOL": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(np.uint8),
}
"""All that quantised matrices are made of."""


def _parse_header(file: DataFile) -> dict[str, StoredTensor]:
    length, brace = struct.unpack("<Qc", file.read(0, 9).tobytes()) if file.size > 8 else (0, b"")
    if brace != b"{" or length > _MAX_HEADER:
        raise file.wrong_format()
    if 8 + length > file.size:
        raise file.truncated(f"its header ends at byte {8 + length:,}")
    try:
        header = json.loads(file.read(8, length).tobytes())
        header.pop("__metadata__", None)
        return {name: _locate(file, 8 + length, name, **entry) for name, entry in header.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointFormatError):
            raise
        raise CheckpointFormatError(f"{file.path} is damaged: its header: {error}") from None


def _locate(
    file: DataFile, base: int, name: str, *, dtype: str, shape: list[int], data_offsets: list[int]
) -> StoredTensor:
    start, end = data_offsets
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise ValueError(f"tensor {name!r} has shape {shape} and offsets {data_offsets}")
    if base + end > file.size:
        raise file.truncated(f"tensor {name!r} ({dtype} {shape}) ends at byte {base + end:,}")
    known = _TYPES.get(dtype)
    if known and end - start != prod(shape) * known.itemsize:
        raise CheckpointFormatError(
            f"{file.path} is damaged: tensor {name!r} is {dtype} {shape}, "
            f"but its bytes are {start} to {end}"
        )
    return StoredTensor(TensorInfo(tuple(shape), dtype), file, base + start, end - start)


class SafetensorsCheckpoint(FileCheckpoint):
    """A folder with config.json and model.safetensors or a sharded index.

    Attributes:
        config: config.json's content.

    Raises:
        CheckpointFormatError: a file is missing, truncated or something else.
        UnsupportedModelError: it is quantised in a way that is not implemented.
    """

    def __init__(self, path: Path):
        self.path = path
        if not (path / CONFIG).exists():
            raise CheckpointFormatError(f"{path} has no {CONFIG}")
        self.config = read_json(path / CONFIG)
        self._stored = self._open_single() if (path / SINGLE).exists() else self._open_sharded()
        self.matrices = self._read_matrices()
        parts = {part for matrix in self.matrices.values() for part in matrix.tensors}
        plain = {name: t.info for name, t in self._stored.items() if name not in parts}
        self.tensors = plain | {
            name: TensorInfo(m.shape, m.coding.name) for name, m in self.matrices.items()
        }

    def _open_single(self) -> dict[str, StoredTensor]:
        return _parse_header(DataFile(self.path / SINGLE, "a safetensors file"))

    def _open_sharded(self) -> dict[str, StoredTensor]:
        index = self.path / INDEX
        if not index.exists():
            raise CheckpointFormatError(f"{self.path} has neither {SINGLE} nor {INDEX}")
        shard_of = read_json(index).get("weight_map")
        if not isinstance(shard_of, dict) or not shard_of:
            raise CheckpointFormatError(f"{index} has no weight_map")
        shards = sorted(set(shard_of.values()))
        outside = [s for s in shards if Path(s).name != s]
        if outside:
            raise CheckpointFormatError(f"{index} names files outside the folder: {outside}")
        missing = [s for s in shards if not (self.path / s).exists()]
        if missing:
            raise CheckpointFormatError(
                f"{self.path}: missing {len(missing)} of {len(shards)} files that {INDEX} "
                f"names: {', '.join(missing)}"
            )
        found = {s: _parse_header(DataFile(self.path / s, "a safetensors file")) for s in shards}
        lacking = [f"{name} ({s})" for name, s in shard_of.items() if name not in found[s]]
        if lacking:
            raise CheckpointFormatError(
                f"{index} names tensors that their files lack: {', '.join(lacking[:20])}"
            )
        return {name: found[shard][name] for name, shard in shard_of.items()}

    def read_architecture(self) -> tuple[DecoderConfig | EncoderConfig, WeightTable]:
        config, table = architecture_from_hf(self.path / CONFIG, self.config)
        return config, fitted(table, self.tensors)

    @property
    def readable_types(self) -> Mapping[str, np.dtype]:
        codings = {matrix.coding.name for matrix in self.matrices.values()}
        return FLOAT_TYPES | dict.fromkeys(codings, np.dtype(np.float32))

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        if name in self.matrices:
            return self.matrices[name].dequantise(start, stop)
        return super().read_rows(name, start, stop)

    def quantised_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.matrices[name].rows(start, stop).to_bytes()

    def block_rows(self, name: str) -> int:
        # Codes may lie along the outputs: few rows are read by many small pieces.
        return super().block_rows(name) * (4 if name in self.matrices else 1)

    def _quantisation(self) -> Mapping[str, Any]:
        """What the folder says of how it is quantised; empty where it is not."""
        for config in (self.config, self.config.get("text_config")):
            for key in SETTINGS:
                if isinstance(config, dict) and config.get(key):
                    return config[key]
        for name, method in SEPARATE_SETTINGS.items():
            if (self.path / name).exists():
                found = read_json(self.path / name)
                return {"quant_method": method} | found | found.get("quantization", {})
        return {}

    def _read_matrices(self) -> Matrices:
        settings = self._quantisation()
        if not settings:
            return {}
        tensors = {name: self._tensor(name) for name in self._stored}
        matrices = read_matrices(settings, tensors)
        self.kv_code = read_kv_code(settings)
        return matrices

    def _tensor(self, name: str) -> Tensor:
        info = self._stored[name].info
        return Tensor(*info, partial(self._raw_rows, name), partial(self._raw_block, name))

    def _raw_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        shape, kind = self._stored[name].info
        return self._bytes(name, start, stop).view(_TYPES[kind]).reshape(stop - start, *shape[1:])

    def _raw_block(self, name: str, start: int, stop: int, first: int, last: int) -> np.ndarray:
        tensor = self._stored[name]
        (_, columns), kind = tensor.info
        size = _TYPES[kind].itemsize
        offset, stride = tensor.offset + (start * columns + first) * size, columns * size
        flat = tensor.file.read_every(offset, (last - first) * size, stride, stop - start)
        return flat.view(_TYPES[kind])
