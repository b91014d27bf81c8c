"""Checkpoint matrices as the native CPU kernels take them, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from llmjax_kernels.packed import TILE, FloatPacker, PackedWeight, Rows, pack_gguf, packs_gguf

from ..models.config import DecoderConfig
from .base import Checkpoint, workers
from .plan import Use


def pack_tensor(
    checkpoint: Checkpoint,
    name: str,
    uses: list[Use],
    config: DecoderConfig,
    dtype: np.dtype | None,
) -> dict[str, PackedWeight]:
    """The weights that one matrix fills, by path.

    Args:
        dtype: float32 or bfloat16 to convert to; None keeps the stored type, quantised too,
            but for those that no kernel reads, which become float32.
    """
    shape, type_name = checkpoint.tensors[name]
    pack: Callable[[Rows], PackedWeight]
    if dtype is None and packs_gguf(type_name, shape[1]):
        # What a family does to a weight only chooses and orders its rows.
        read = partial(checkpoint.quantised_rows, name)
        pack = partial(pack_gguf, type_name, K=shape[1])
    else:
        read = partial(checkpoint.read_rows, name)
        kind = _packed_type(checkpoint.readable_types[type_name]) if dtype is None else dtype
        step = max(1, checkpoint.block_rows(name) // TILE) * TILE
        pack = partial(_pack_values, K=shape[1], dtype=kind, step=step)
    if all(use.transform is None for use in uses):
        return {use.path: pack(_RowsOnDemand(shape[0], read)) for use in uses}
    stored = read(0, shape[0])
    return {
        path: pack(stored if transform is None else transform(stored, config))
        for path, transform in uses
    }


@dataclass(frozen=True)
class _RowsOnDemand:
    """A matrix that is read slice by slice, without a copy of it all in memory."""

    count: int
    read: Callable[[int, int], np.ndarray]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.read(*rows.indices(self.count)[:2])


def _packed_type(stored: np.dtype) -> np.dtype:
    return stored if stored.itemsize == 2 and stored != np.float16 else np.dtype(np.float32)


def _pack_values(rows: Rows, K: int, dtype: np.dtype, step: int) -> PackedWeight:
    packer = FloatPacker((len(rows), K), dtype)

    def add(start: int) -> None:
        packer.add(start, rows[start : start + step])

    list(workers().map(add, range(0, len(rows), step)))
    return packer.done()
