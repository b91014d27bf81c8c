"""Checkpoint matrices quantised for GPUs, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from llmjax_kernels.native import library
from llmjax_kernels.packed import Arena, Rows
from llmjax_kernels.quant_matmul import (
    InputFormat,
    QuantFormat,
    QuantWeight,
    format_here,
    from_coded,
    from_packed,
    quant_format,
    quantise_weight,
)
from llmjax_kernels.weight_format import QUANTISATIONS

from ..errors import CheckpointFormatError, ConfigError, UnsupportedModelError
from ..models.config import DecoderConfig
from ..quant import Inputs
from .base import Checkpoint
from .packing import head_path, matrices_of, require_floats, rows_of
from .plan import Plan, Use


class Quantiser:
    """Quantises the matrices of a plan, each in arrays of its own on the device.

    int8 and int4 get the codes and scales that they get for CPUs. FP8 leaves the embedding and
    the matrix that gives the logits as they are. What is quantised already keeps its codes.

    Args:
        plan: the tensors to read.
        wanted: the decoder's parameters, by path.
        quantization: "int8", "int4" or "fp8" of what is stored as floats; None leaves those.
        only_rounded: codes are kept only where a scheme rounds inputs too.

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
    ):
        self._checkpoint, self._config, self._quantization = checkpoint, config, quantization
        self._weights: dict[str, QuantWeight] = {}
        self._head = head_path(config)
        matrices = matrices_of(plan, wanted)
        self.tensors = {name for name in matrices if self._keeps(name, only_rounded)}
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
        for path, rows in rows_of(self._checkpoint, self._config, name, uses):
            K = self._checkpoint.tensors[name].shape[1]
            try:
                self._weights[path] = self._quantise(path, rows, K)
            except ValueError as error:
                raise ConfigError(f"quantization: {name} cannot be quantised: {error}") from error

    def done(self) -> dict[str, QuantWeight]:
        """All weights, by path."""
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
        K = matrix.shape[1]
        for path, rows in rows_of(self._checkpoint, self._config, name, uses, as_stored=True):
            try:
                weight = from_coded(
                    rows[:], K, matrix.coding, format, matrix.order, _static(matrix.inputs)
                )
            except ValueError as error:
                raise CheckpointFormatError(f"{name} is damaged: {error}") from error
            self._weights[path] = jax.block_until_ready(weight)

    def _quantise(self, path: str, rows: Rows, K: int) -> QuantWeight:
        name = "int8" if path == self._head else self._quantization
        assert name is not None
        if name not in QUANTISATIONS:
            return _rounded(jnp.asarray(rows[:]), format_here(name))
        arena = Arena(QUANTISATIONS[name].nbytes(len(rows), K))
        [packed] = arena.to_device({path: arena.quantise(rows, K, name)}).values()
        # One at a time: what is packed stays on the device until it has been laid out anew.
        return jax.block_until_ready(from_packed(packed))


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


def require_library(said: str) -> None:
    """Raises ConfigError where what was said ("quantization is 'int8'") takes the native library,
    and that is not there."""
    try:
        library()
    except OSError as error:
        raise ConfigError(
            f"{said}, which the native library makes, and that cannot be loaded: {error}"
        ) from error
