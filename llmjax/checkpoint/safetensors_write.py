"""Writes safetensors files and the index of several."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .safetensors_folder import _TYPES, INDEX

_NAMES = {dtype: name for name, dtype in _TYPES.items() if name not in ("BOOL", "F8_E8M0")}
"""One for each type: bytes are U8, whatever else is read as such."""


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One file, which appears under its name when it is complete.

    Raises:
        OSError: it cannot be written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin where any type may
    scratch = path.with_name(f".{path.name}.part")
    with scratch.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())
    os.replace(scratch, path)


def write_index(folder: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    """The index of a folder's files.

    Args:
        files: of each file the bytes of its tensors, by name.
    """
    total = sum(sum(sizes.values()) for sizes in files.values())
    weight_map = {name: file for file, sizes in files.items() for name in sizes}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
