"""Checkpoint matrices as the native CPU kernels take them, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from llmjax_kernels.packed import (
    Arena,
    PackedWeight,
    Rows,
    WeightFormat,
    float_format,
    gguf_format,
)

from ..models.config import DecoderConfig
from .base import Checkpoint
from .plan import Plan, Use


class Packer:
    """Packs the matrices of a plan into one array.

    Args:
        plan: the tensors to read.
        wanted: the decoder's parameters, by path.
        dtype: float32 or bfloat16 to convert to; None keeps the stored type, quantised too,
            but for those that no kernel reads, which become float32.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        plan: Plan,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        dtype: np.dtype | None,
    ):
        self._checkpoint, self._config, self._dtype = checkpoint, config, dtype
        self._weights: dict[str, PackedWeight] = {}
        self.tensors = {n for n, uses in plan.items() if len(wanted[uses[0].path].shape) == 2}
        shapes = {
            use.path: (name, *wanted[use.path].shape) for name in self.tensors for use in plan[name]
        }
        sizes = (self._format(name).nbytes(N, K) for name, N, K in shapes.values())
        self._arena = Arena(sum(sizes))

    def add(self, name: str, uses: list[Use]) -> None:
        """Packs what one tensor fills."""
        (rows, K), type_name = self._checkpoint.tensors[name]
        pack: Callable[[Rows], PackedWeight]
        if self._stays_quantised(name):
            # What a family does to a weight only chooses and orders its rows.
            read = partial(self._checkpoint.quantised_rows, name)
            pack = partial(self._arena.pack_gguf, type_name, K=K)
        else:
            read = partial(self._checkpoint.read_rows, name)
            pack = partial(self._arena.pack_float, K=K, dtype=self._float_type(name))
        if all(use.transform is None for use in uses):
            self._weights |= {use.path: pack(_RowsOnDemand(rows, read)) for use in uses}
            return
        stored = read(0, rows)
        for path, transform in uses:
            self._weights[path] = pack(
                stored if transform is None else transform(stored, self._config)
            )

    def done(self) -> dict[str, PackedWeight]:
        """All weights, by path, on the device."""
        return self._arena.to_device(self._weights)

    def _stays_quantised(self, name: str) -> bool:
        shape, type_name = self._checkpoint.tensors[name]
        return self._dtype is None and gguf_format(type_name, shape[1]) is not None

    def _format(self, name: str) -> WeightFormat:
        shape, type_name = self._checkpoint.tensors[name]
        quantised = gguf_format(type_name, shape[1]) if self._dtype is None else None
        return quantised or float_format(self._float_type(name))

    def _float_type(self, name: str) -> np.dtype:
        if self._dtype is not None:
            return self._dtype
        stored = self._checkpoint.readable_types[self._checkpoint.tensors[name].type_name]
        return stored if stored.itemsize == 2 and stored != np.float16 else np.dtype(np.float32)


@dataclass(frozen=True)
class _RowsOnDemand:
    """A matrix that is read slice by slice, without a copy of it all in memory."""

    count: int
    read: Callable[[int, int], np.ndarray]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.read(*rows.indices(self.count)[:2])
