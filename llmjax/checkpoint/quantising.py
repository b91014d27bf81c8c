"""Checkpoint matrices quantised for GPUs, tensor by tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int

from llmjax_kernels.native import library
from llmjax_kernels.packed import Arena, Rows
from llmjax_kernels.quant_matmul import (
    InputFormat,
    QuantFormat,
    QuantWeight,
    format_here,
    from_coded,
    from_gguf,
    from_packed,
    gguf_quant_format,
    quant_format,
    quantise_weight,
)
from llmjax_kernels.weight_format import QUANTISATIONS

from ..errors import CheckpointFormatError, ConfigError, UnsupportedModelError
from ..models.config import DecoderConfig
from ..models.weights import Transform
from ..quant import CodedRows, Inputs
from .base import FLOAT_TYPES, Checkpoint
from .dividing import Deal, ReadRows, deal, dealt_out, say, shared_out
from .packing import head_path, matrices_of, require_floats, rows_of
from .plan import Plan, Use

log = logging.getLogger(__name__)


class Quantiser:
    """Quantises the matrices of a plan, each in arrays of its own on its device, or devices.

    int8 and int4 get the codes and scales that they get for CPUs. FP8 leaves the embedding and
    the matrix that gives the logits as they are. What is quantised already keeps its codes;
    of GGUF's types that no kernel reads the log says so.

    Args:
        plan: the tensors to read.
        wanted: the decoder's parameters, by path.
        quantization: "int8", "int4" or "fp8" of what is stored as floats; None leaves those.
        only_rounded: codes are kept only where a scheme rounds inputs too.
        sources: `Partition.sources`, where several devices share matrices.

    Attributes:
        tensors: that it takes.

    Raises:
        ConfigError: they cannot be quantised so.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        plan: Plan,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        quantization: str | None,
        *,
        only_rounded: bool = False,
        sources: Mapping[str, Int[np.ndarray, " places"]] = MappingProxyType({}),
    ):
        self._checkpoint, self._config, self._quantization = checkpoint, config, quantization
        self._wanted, self._sources = wanted, sources
        self._weights: dict[str, QuantWeight] = {}
        self._dealt: dict[str, Deal] = {}
        self._head = head_path(config)
        matrices = matrices_of(plan, wanted)
        self.tensors = {name for name in matrices if self._keeps(name, only_rounded)}
        self._gguf = set() if only_rounded else self._gguf_tensors(matrices)
        self.tensors |= self._gguf
        if quantization is None:
            return
        if quantization in QUANTISATIONS:
            require_library(f"quantization is {quantization!r}")
        else:
            ends = ("embed.weight", self._head)
            matrices -= {n for n, uses in plan.items() if any(u.path in ends for u in uses)}
        self.tensors |= require_floats(checkpoint, matrices, quantization)

    def add(self, name: str, uses: list[Use]) -> None:
        """Quantises what one tensor fills, or keeps its codes."""
        if name in self._checkpoint.matrices:
            self._keep(name, uses)
            return
        if name in self._gguf:
            self._keep_gguf(name, uses)
            return
        for path, rows in rows_of(self._checkpoint, self._config, name, uses):
            K = self._checkpoint.tensors[name].shape[1]
            try:
                self._put(path, self._quantise(path, rows, K))
            except ValueError as error:
                raise ConfigError(f"quantization: {name} cannot be quantised: {error}") from error

    def done(self) -> dict[str, QuantWeight]:
        """All weights, by path."""
        say(self._dealt)
        return self._weights

    def _keeps(self, name: str, only_rounded: bool) -> bool:
        matrix = self._checkpoint.matrices.get(name)
        if matrix is None or (only_rounded and matrix.inputs is None):
            return False
        return self._kept(name) is not None

    def _kept(self, name: str) -> QuantFormat | None:
        """How a matrix keeps its codes; None where it does not.

        Raises:
            UnsupportedModelError: inputs are to be rounded, and no product takes its groups.
        """
        matrix = self._checkpoint.matrices[name]
        format = quant_format(matrix.coding, matrix.shape[1])
        if matrix.inputs is None:
            return format
        if format is None:
            raise UnsupportedModelError(
                f"{name} ({matrix.coding.name}): products that round their inputs take groups of "
                f"multiples of 16 weights, and these have {matrix.coding.group}"
            )
        return format._replace(inputs=input_format(matrix.inputs))

    def _keep(self, name: str, uses: list[Use]) -> None:
        matrix, format = self._checkpoint.matrices[name], self._kept(name)
        assert format is not None
        K, static = matrix.shape[1], _static(matrix.inputs)
        for path, read in self._readers(name, uses):
            wanted = self._wanted[path]
            try:
                if isinstance(wanted.sharding, NamedSharding):
                    dealing = self._deal(path, format, matrix.order)
                    weight = dealt_out(read, matrix, dealing, static)
                else:
                    rows = read(0, wanted.shape[0], slice(0, K)).to_bytes()
                    weight = from_coded(rows, K, matrix.coding, format, matrix.order, static)
            except ValueError as error:
                raise CheckpointFormatError(f"{name} is damaged: {error}") from error
            self._put(path, weight)

    def _readers(self, name: str, uses: list[Use]) -> Iterator[tuple[str, ReadRows]]:
        """What a quantised matrix fills: paths, and what reads the rows of each."""
        matrix = self._checkpoint.matrices[name]
        if all(use.transform is None for use in uses):
            for use in uses:
                yield use.path, matrix.rows
            return
        # What a family does to a weight only chooses and orders its rows.
        stored = matrix.rows(0, matrix.shape[0])
        for path, transform in uses:
            yield path, partial(_cut, _chosen(stored, transform, self._config))

    def _put(self, path: str, weight: QuantWeight) -> None:
        """Where it belongs, before the next one is made."""
        sharding = self._wanted[path].sharding
        if not isinstance(sharding, NamedSharding):
            weight = jax.device_put(weight, sharding)
        elif weight.layout is None:
            order = None if weight.order is None else np.asarray(weight.order)
            weight = shared_out(weight, self._deal(path, weight.format, order))
        self._weights[path] = jax.block_until_ready(weight)

    def _deal(self, path: str, format: QuantFormat, order: Int[np.ndarray, " K"] | None) -> Deal:
        wanted = self._wanted[path]
        dealing = deal(path, wanted.shape, format, order, self._sources, wanted.sharding.mesh)
        self._dealt[path] = dealing
        return dealing

    def _gguf_tensors(self, matrices: set[str]) -> set[str]:
        """Those of GGUF's that keep their codes. The log says which types do not, and why."""
        tensors, others = self._checkpoint.tensors, matrices - self._checkpoint.matrices.keys()
        infos = {n: tensors[n] for n in others if tensors[n].type_name not in FLOAT_TYPES}
        problem = library_problem() if infos else None
        known = {n for n, i in infos.items() if gguf_quant_format(i.type_name, i.shape[1])}
        kept = set() if problem else known
        if left := {infos[name].type_name for name in infos.keys() - kept}:
            log.warning(
                "%s: matrices in %s become floats: %s",
                self._checkpoint.path,
                ", ".join(sorted(left)),
                problem or "no kernel for GPUs reads them",
            )
        return kept

    def _keep_gguf(self, name: str, uses: list[Use]) -> None:
        (_, K), type_name = self._checkpoint.tensors[name]
        for path, rows in rows_of(self._checkpoint, self._config, name, uses, as_stored=True):
            try:
                weight = from_gguf(type_name, rows, K)
            except ValueError as error:
                raise CheckpointFormatError(f"{name} is damaged: {error}") from error
            self._put(path, weight)

    def _quantise(self, path: str, rows: Rows, K: int) -> QuantWeight:
        name = "int8" if path == self._head else self._quantization
        assert name is not None
        if name not in QUANTISATIONS:
            return _rounded(jnp.asarray(rows[:]), format_here(name))
        arena = Arena(QUANTISATIONS[name].nbytes(len(rows), K))
        [packed] = arena.to_device({path: arena.quantise(rows, K, name)}).values()
        # One at a time: what is packed stays on the device until it has been laid out anew.
        return jax.block_until_ready(from_packed(packed))


def _cut(rows: CodedRows, start: int, stop: int, places: slice) -> CodedRows:
    some = _of_each(rows, lambda x: x[start:stop])
    return some._replace(codes=some.codes[:, places])


def _chosen(rows: CodedRows, transform: Transform | None, config: DecoderConfig) -> CodedRows:
    return rows if transform is None else _of_each(rows, lambda x: transform(x, config))


def _of_each(rows: CodedRows, function: Callable[[np.ndarray], np.ndarray]) -> CodedRows:
    codes, scales, minima = rows
    return CodedRows(
        function(codes), function(scales), None if minima is None else function(minima)
    )


def input_format(inputs: Inputs) -> InputFormat:
    """How kernels call it."""
    return InputFormat(
        inputs.code,
        inputs.group,
        inputs.reach,
        inputs.scale is not None and inputs.scales == "float32",
        inputs.symmetric,
        inputs.scales,
        inputs.threshold,
    )


def _static(inputs: Inputs | None) -> jax.Array | None:
    """`QuantWeight.static_inputs`."""
    if inputs is None or inputs.scale is None:
        return None
    return jnp.asarray([inputs.scale, inputs.zero], jnp.float32)


def _rounded(values: jax.Array, format: QuantFormat) -> QuantWeight:
    if not jnp.isfinite(values).all():
        raise ValueError("it has values that are not finite")
    return jax.block_until_ready(jax.jit(quantise_weight, static_argnums=1)(values, format))


def library_problem() -> str | None:
    """Why the native library, which makes weights for GPUs too, cannot be used."""
    try:
        library()
    except OSError as error:
        return f"the native library cannot be loaded: {error}"
    return None


def require_library(said: str) -> None:
    """Raises ConfigError where what was said ("quantization is 'int8'") takes the native library,
    and that is not there."""
    if problem := library_problem():
        raise ConfigError(f"{said}, but {problem}")
