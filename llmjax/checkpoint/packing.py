"""Checkpoint matrices as the native CPU kernels take them, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from llmjax_kernels.packed import (
    GGUF_FORMATS,
    QUANTISATIONS,
    Arena,
    PackedWeight,
    Rows,
    WeightFormat,
    float_format,
    gguf_format,
)

from ..errors import ConfigError
from ..models.config import DecoderConfig
from .base import FLOAT_TYPES, Checkpoint
from .plan import Plan, Use


class Packing(NamedTuple):
    """What matrices become for the native kernels.

    Attributes:
        dtype: float32 or bfloat16 to convert to; None keeps the stored type, quantised too,
            but for those that no kernel reads, which become float32.
        quantization: "int8" or "int4", to quantise what is stored as floats; None does not.
    """

    dtype: np.dtype | None = None
    quantization: str | None = None


class Packer:
    """Packs the matrices of a plan into one array.

    Args:
        plan: the tensors to read.
        wanted: the decoder's parameters, by path.

    Raises:
        ConfigError: they cannot be quantised as `packing` asks.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        plan: Plan,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        packing: Packing,
    ):
        self._checkpoint, self._config, self._packing = checkpoint, config, packing
        self._weights: dict[str, PackedWeight] = {}
        self.tensors = {n for n, uses in plan.items() if len(wanted[uses[0].path].shape) == 2}
        if packing.quantization:
            self._check_quantization(packing.quantization)
        sizes = (
            self._format(name, use.path).nbytes(*wanted[use.path].shape)
            for name in self.tensors
            for use in plan[name]
        )
        self._arena = Arena(sum(sizes))

    def add(self, name: str, uses: list[Use]) -> None:
        """Packs what one tensor fills."""
        count = self._checkpoint.tensors[name].shape[0]
        # What a family does to a weight only chooses and orders its rows.
        as_stored = self._stays_quantised(name)
        reader = self._checkpoint.quantised_rows if as_stored else self._checkpoint.read_rows
        read = partial(reader, name)
        if all(use.transform is None for use in uses):
            for use in uses:
                self._weights[use.path] = self._pack(name, use.path, _RowsOnDemand(count, read))
            return
        stored = read(0, count)
        for path, transform in uses:
            rows = stored if transform is None else transform(stored, self._config)
            self._weights[path] = self._pack(name, path, rows)

    def done(self) -> dict[str, PackedWeight]:
        """All weights, by path, on the device."""
        return self._arena.to_device(self._weights)

    def _pack(self, name: str, path: str, rows: Rows) -> PackedWeight:
        (_, K), type_name = self._checkpoint.tensors[name]
        if self._stays_quantised(name):
            return self._arena.pack_gguf(type_name, rows, K)
        quantization = self._quantization(path)
        if quantization is None:
            return self._arena.pack_float(rows, K, self._float_type(name))
        try:
            return self._arena.quantise(rows, K, quantization)
        except ValueError as error:
            raise ConfigError(f"quantization: {name} cannot be quantised: {error}") from error

    def _check_quantization(self, quantization: str) -> None:
        """Says what cannot be quantised, before anything is allocated."""
        infos = [(name, *self._checkpoint.tensors[name]) for name in sorted(self.tensors)]
        already = [f"{name} ({kind})" for name, _, kind in infos if kind not in FLOAT_TYPES]
        if already:
            raise ConfigError(
                f"quantization is {quantization!r}, but {self._checkpoint.path} is quantised "
                f"already ({_some(already)}): leave quantization out"
            )
        odd = [f"{name} {list(shape)}" for name, shape, _ in infos if shape[1] % 32]
        if odd:
            raise ConfigError(
                f"quantization is {quantization!r}, allowed only where rows are whole groups of "
                f"32 weights; not so: {_some(odd)}"
            )

    def _stays_quantised(self, name: str) -> bool:
        shape, type_name = self._checkpoint.tensors[name]
        return self._packing.dtype is None and gguf_format(type_name, shape[1]) is not None

    def _quantization(self, path: str) -> str | None:
        """Of a parameter: what gives the logits stays at 8 bits, as llama.cpp keeps it finer."""
        head = "embed.weight" if self._config.tie_embeddings else "head.weight"
        asked = self._packing.quantization
        return "int8" if asked and path == head else asked

    def _format(self, name: str, path: str) -> WeightFormat:
        if self._stays_quantised(name):
            return GGUF_FORMATS[self._checkpoint.tensors[name].type_name][1]
        quantization = self._quantization(path)
        return QUANTISATIONS[quantization] if quantization else float_format(self._float_type(name))

    def _float_type(self, name: str) -> np.dtype:
        if self._packing.dtype is not None:
            return self._packing.dtype
        stored = self._checkpoint.readable_types[self._checkpoint.tensors[name].type_name]
        return stored if stored.itemsize == 2 and stored != np.float16 else np.dtype(np.float32)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@dataclass(frozen=True)
class _RowsOnDemand:
    """A matrix that is read slice by slice, without a copy of it all in memory."""

    count: int
    read: Callable[[int, int], np.ndarray]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.read(*rows.indices(self.count)[:2])
