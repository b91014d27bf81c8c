"""GGUF checkpoints: one file or a split set, dequantised by blocks."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGUF_VERSION, GGMLQuantizationType

from ..errors import CheckpointFormatError
from ..models.config import DecoderConfig
from ..models.rope_config import ROPE_TENSORS
from ..models.weights import WeightTable
from .architecture import architecture_from_gguf
from .base import FLOAT_TYPES
from .data_file import DataFile, FileCheckpoint, StoredTensor
from .gguf_header import Header, Metadata, parse_header
from .text import METADATA, TextSide, text_from_gguf

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@functools.cache
def readable_types() -> dict[str, np.dtype]:
    """Names of the tensor types that can be read, and the dtype that reading gives."""
    quantised = (k.name for k in GGMLQuantizationType if _is_dequantised(k))
    return dict.fromkeys(quantised, np.dtype(np.float32)) | FLOAT_TYPES


def _is_dequantised(kind: GGMLQuantizationType) -> bool:
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def split_parts(path: Path) -> list[Path]:
    """The files of the split set that `path` is a part of, in order; [path] if it is none."""
    match = _SPLIT_NAME.match(path.name)
    if match is None:
        return [path]
    stem, count = match["stem"], int(match["count"])
    return [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


def gguf_metadata(path: Path) -> Metadata:
    """The metadata of one GGUF file."""
    return parse_header(DataFile(path, "a GGUF file")).metadata


class GGUFCheckpoint(FileCheckpoint):
    """A GGUF model.

    Args:
        path: the file, or any part of a split set.

    Attributes:
        config: the metadata.

    Raises:
        ModelNotFoundError: the file does not exist.
        CheckpointFormatError: not a readable GGUF file, truncated, or a part is missing.
        UnsupportedModelError: a tensor's type is not known at all.
    """

    def __init__(self, path: Path):
        self.path = path
        self.parts = split_parts(path)
        missing = [p.name for p in self.parts if not p.exists()] if len(self.parts) > 1 else []
        if missing:
            raise CheckpointFormatError(
                f"{path} is one of {len(self.parts)} parts; missing beside it: {', '.join(missing)}"
            )
        files = [DataFile(p, "a GGUF file") for p in self.parts]
        headers = [parse_header(f) for f in files]
        self._check_split(headers)
        self.config = headers[0].metadata
        self._first_file, self._first_header = files[0], headers[0]
        self._stored: dict[str, StoredTensor] = {}
        for file, header in zip(files, headers, strict=True):
            twice = self._stored.keys() & header.tensors.keys()
            if twice:
                raise CheckpointFormatError(f"{file.path}: {sorted(twice)} are in another part too")
            self._stored |= header.tensors
        self.tensors = {name: stored.info for name, stored in self._stored.items()}
        self._check_split_total()

    def _check_split(self, headers: list[Header]) -> None:
        for number, (path, header) in enumerate(zip(self.parts, headers, strict=True)):
            count = header.metadata.get("split.count", 1)
            if count > 1 and count != len(self.parts):
                raise CheckpointFormatError(
                    f"{path} is one of {count} parts, but its name does not say so; "
                    f"expected a name like model-00001-of-{count:05}.gguf"
                )
            if header.metadata.get("split.no", number) != number:
                raise CheckpointFormatError(
                    f"{path} is part {header.metadata['split.no'] + 1} by its content; "
                    "the files of the split set were renamed"
                )

    def _check_split_total(self) -> None:
        expected = self.config.get("split.tensors.count")
        if expected and expected != len(self._stored):
            raise CheckpointFormatError(
                f"{self.path}: the split set has {len(self._stored)} tensors, expected {expected}"
            )

    def read_architecture(self) -> tuple[DecoderConfig, WeightTable]:
        settings = {
            key: self.config[key] for key in self.config if not key.startswith("tokenizer.")
        }
        for name in self.tensors.keys() & set(ROPE_TENSORS):
            settings[name] = self.read(name).tolist()
        return architecture_from_gguf(self.path, settings, self.tensors)

    def read_text_side(self) -> TextSide:
        return text_from_gguf(self.config)

    def copy_text_side(self, folder: Path) -> None:
        """Writes a GGUF file with this one's metadata, byte for byte, and no tensors."""
        start, end = self._first_header.metadata_range
        head = struct.pack("<4sIQQ", b"GGUF", GGUF_VERSION, 0, self._first_header.metadata_count)
        (folder / METADATA).write_bytes(head + self._first_file.read(start, end - start).tobytes())

    @property
    def readable_types(self) -> Mapping[str, np.dtype]:
        return readable_types()

    def quantised_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._bytes(name, start, stop).reshape(stop - start, -1)

    def block_rows(self, name: str) -> int:
        # A quantised vector's blocks are not its rows: it is read in one go.
        shape, kind = self.tensors[name]
        one_go = len(shape) == 1 and kind not in FLOAT_TYPES
        return shape[0] if one_go else super().block_rows(name)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        shape, kind = self.tensors[name]
        if kind in FLOAT_TYPES:
            return super().read_rows(name, start, stop)
        # As one row: gguf otherwise works on 16 rows at a time, which is slower.
        data = self._bytes(name, start, stop).reshape(1, -1)
        return quants.dequantize(data, GGMLQuantizationType[kind]).reshape(stop - start, *shape[1:])
