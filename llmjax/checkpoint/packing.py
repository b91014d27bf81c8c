"""Checkpoint matrices as the native CPU kernels take them, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np

from llmjax_kernels.packed import Arena, PackedWeight, Rows, order_nbytes
from llmjax_kernels.weight_format import (
    QUANTISATIONS,
    WeightFormat,
    coded_format,
    float_format,
    gguf_format,
)

from ..errors import CheckpointFormatError, ConfigError
from ..models.config import DecoderConfig
from ..quant import Coding
from .base import FLOAT_TYPES, Checkpoint
from .plan import Plan, Use


class Packing(NamedTuple):
    """What matrices become for the native kernels.

    Attributes:
        dtype: float32 or bfloat16 to convert to; None keeps the stored type, quantised too,
            but for those that no kernel reads, which become float32 (see `float_type_of`).
        quantization: "int8" or "int4", to quantise what is stored as floats; None does not.
            What is quantised already stays so.
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
        self.tensors = matrices_of(plan, wanted)
        if packing.quantization:
            require_floats(checkpoint, self.tensors, packing.quantization)
        sizes = (
            self._format(name, use.path).nbytes(*wanted[use.path].shape)
            for name in self.tensors
            for use in plan[name]
        )
        self._arena = Arena(sum(sizes) + self._order_bytes())

    def add(self, name: str, uses: list[Use]) -> None:
        """Packs what one tensor fills."""
        as_stored = self._kept(name) is not None
        for path, rows in rows_of(self._checkpoint, self._config, name, uses, as_stored=as_stored):
            self._weights[path] = self._pack(name, path, rows)

    def done(self) -> dict[str, PackedWeight]:
        """All weights, by path, on the device."""
        return self._arena.to_device(self._weights)

    def _pack(self, name: str, path: str, rows: Rows) -> PackedWeight:
        (_, K), type_name = self._checkpoint.tensors[name]
        if self._kept(name) is not None:
            matrix = self._checkpoint.matrices.get(name)
            if matrix is None:
                return self._arena.pack_gguf(type_name, rows, K)
            try:
                return self._arena.pack_coded(rows, K, matrix.coding, matrix.order)
            except ValueError as error:
                raise CheckpointFormatError(f"{name} is damaged: {error}") from error
        quantization = self._quantization(name, path)
        if quantization is None:
            return self._arena.pack_float(rows, K, self._float_type(name))
        try:
            return self._arena.quantise(rows, K, quantization)
        except ValueError as error:
            raise ConfigError(f"quantization: {name} cannot be quantised: {error}") from error

    def _kept(self, name: str) -> WeightFormat | None:
        """How a tensor's codes stay as they are; None where they do not, or it has none."""
        (_, K), type_name = self._checkpoint.tensors[name]
        matrix = self._checkpoint.matrices.get(name)
        if self._packing.dtype is not None:
            return None
        return gguf_format(type_name, K) if matrix is None else coded_format(matrix.coding, K)

    def _order_bytes(self) -> int:
        """Of the orders of inputs that the kept matrices have, each once."""
        matrices = self._checkpoint.matrices
        orders = [matrices[n].order for n in self.tensors & matrices.keys() if self._kept(n)]
        different = {order.tobytes(): len(order) for order in orders if order is not None}
        return sum(map(order_nbytes, different.values()))

    def _quantization(self, name: str, path: str) -> str | None:
        """Of a parameter: what gives the logits stays at 8 bits, as llama.cpp keeps it finer."""
        is_float = self._checkpoint.tensors[name].type_name in FLOAT_TYPES
        asked = self._packing.quantization if is_float else None
        return "int8" if asked and path == head_path(self._config) else asked

    def _format(self, name: str, path: str) -> WeightFormat:
        kept = self._kept(name)
        if kept is not None:
            return kept
        quantization = self._quantization(name, path)
        return QUANTISATIONS[quantization] if quantization else float_format(self._float_type(name))

    def _float_type(self, name: str) -> np.dtype:
        if self._packing.dtype is not None:
            return self._packing.dtype
        if name in self._checkpoint.matrices:
            return float_type_of(self._checkpoint.matrices[name].coding)
        stored = self._checkpoint.readable_types[self._checkpoint.tensors[name].type_name]
        return stored if stored.itemsize == 2 and stored != np.float16 else np.dtype(np.float32)


def float_type_of(coding: Coding) -> np.dtype:
    """What the values of codes become where no kernel reads these.

    bfloat16 where codes have at most four significant bits (E4M3 among them): its rounding is a
    32nd of half their step, or less. float32 for finer ones.
    """
    fine = coding.table is None and coding.bits > 4
    return np.dtype(np.float32) if fine else np.dtype(ml_dtypes.bfloat16)


def matrices_of(plan: Plan, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> set[str]:
    """The tensors of a plan that fill matrices."""
    return {name for name, uses in plan.items() if len(wanted[uses[0].path].shape) == 2}


def head_path(config: DecoderConfig) -> str:
    """The parameter that gives the logits."""
    return "embed.weight" if config.tie_embeddings else "head.weight"


def require_floats(checkpoint: Checkpoint, tensors: set[str], quantization: str) -> set[str]:
    """Those that are to be quantised: `checkpoint.matrices` stay as they are.

    Raises:
        ConfigError: others are quantised already, or all, or rows of floats are no whole groups.
    """
    infos = {name: checkpoint.tensors[name] for name in sorted(tensors)}
    floats = {name for name, info in infos.items() if info.type_name in FLOAT_TYPES}
    if not floats or infos.keys() - floats - checkpoint.matrices.keys():
        already = [f"{n} ({info.type_name})" for n, info in infos.items() if n not in floats]
        raise ConfigError(
            f"quantization is {quantization!r}, but {checkpoint.path} is quantised "
            f"already ({some_of(already)}): leave quantization out"
        )
    size = QUANTISATIONS[quantization].group if quantization in QUANTISATIONS else 1
    shapes = {name: info.shape for name, info in infos.items() if name in floats}
    odd = [f"{name} {list(shape)}" for name, shape in shapes.items() if shape[1] % size]
    if odd:
        raise ConfigError(
            f"quantization is {quantization!r}, allowed only where rows are whole groups of "
            f"{size} weights; not so: {some_of(odd)}"
        )
    return floats


def rows_of(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    name: str,
    uses: list[Use],
    *,
    as_stored: bool = False,
) -> Iterator[tuple[str, Rows]]:
    """What a tensor fills: paths, and rows that are read when they are asked for.

    Args:
        as_stored: quantised rows, without a change.
    """
    count = checkpoint.tensors[name].shape[0]
    read = partial(checkpoint.quantised_rows if as_stored else checkpoint.read_rows, name)
    if all(use.transform is None for use in uses):
        for use in uses:
            yield use.path, _RowsOnDemand(count, read)
        return
    # What a family does to a weight only chooses and orders its rows.
    stored = read(0, count)
    for path, transform in uses:
        yield path, stored if transform is None else transform(stored, config)


def some_of(names: list[str]) -> str:
    """A few names, and how many more there are."""
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
