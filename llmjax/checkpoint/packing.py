"""Checkpoint matrices as the native CPU kernels take them, tensor by tensor."""

from __future__ import annotations

import numpy as np

from llmjax_kernels.packed import TILE, FloatPacker, PackedWeight, pack_gguf, packs_gguf

from ..models.config import DecoderConfig
from .base import Checkpoint
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
    type_name, shape = checkpoint.tensors[name].type_name, checkpoint.tensors[name].shape
    if dtype is None and packs_gguf(type_name, shape[-1]):
        rows = checkpoint.quantised_rows(name)
        if rows is not None:
            # What a family does to a weight only chooses and orders its rows.
            packed = {
                path: pack_gguf(type_name, _apply(transform, rows, config), shape[1])
                for path, transform in uses
            }
            checkpoint.release(name)
            return packed
    if dtype is None:
        dtype = checkpoint.readable_types[type_name]
        dtype = dtype if dtype.itemsize == 2 and dtype != np.float16 else np.dtype(np.float32)
    if len(uses) == 1 and uses[0].transform is None:
        return {uses[0].path: _pack_by_blocks(checkpoint, name, dtype)}
    stored = checkpoint.read(name)
    packed = {path: _pack(_apply(transform, stored, config), dtype) for path, transform in uses}
    checkpoint.release(name)
    return packed


def _apply(transform, rows: np.ndarray, config: DecoderConfig) -> np.ndarray:
    return rows if transform is None else transform(rows, config)


def _pack(values: np.ndarray, dtype: np.dtype) -> PackedWeight:
    packer = FloatPacker(values.shape, dtype)
    packer.add(0, values)
    return packer.done()


def _pack_by_blocks(checkpoint: Checkpoint, name: str, dtype: np.dtype) -> PackedWeight:
    """Without a second copy of the matrix in memory."""
    shape = checkpoint.tensors[name].shape
    packer = FloatPacker(shape, dtype)
    step = max(1, checkpoint.block_rows(name) // TILE) * TILE
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        packer.add(start, checkpoint.read_rows(name, start, stop))
        checkpoint.release_rows(name, start, stop)
    return packer.done()
