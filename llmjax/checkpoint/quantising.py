"""Checkpoint matrices quantised for GPUs, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from llmjax_kernels.native import library
from llmjax_kernels.packed import QUANTISATIONS, Arena, Rows
from llmjax_kernels.quant_matmul import (
    QuantFormat,
    QuantWeight,
    format_here,
    from_packed,
    quantise_weight,
)

from ..errors import ConfigError
from ..models.config import DecoderConfig
from .base import Checkpoint
from .packing import check_quantization, head_path, matrices_of, rows_of
from .plan import Plan, Use


class Quantiser:
    """Quantises the matrices of a plan, each in arrays of its own on the device.

    int8 and int4 get the codes and scales that they get for CPUs. FP8 leaves the embedding and
    the matrix that gives the logits as they are.

    Args:
        plan: the tensors to read.
        wanted: the decoder's parameters, by path.
        quantization: "int8", "int4" or "fp8".

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
        quantization: str,
    ):
        self._checkpoint, self._config, self._quantization = checkpoint, config, quantization
        self._weights: dict[str, QuantWeight] = {}
        self._head = head_path(config)
        self.tensors = matrices_of(plan, wanted)
        if quantization in QUANTISATIONS:
            require_library(f"quantization is {quantization!r}")
        else:
            ends = ("embed.weight", self._head)
            self.tensors -= {n for n, uses in plan.items() if any(u.path in ends for u in uses)}
        check_quantization(checkpoint, self.tensors, quantization)

    def add(self, name: str, uses: list[Use]) -> None:
        """Quantises what one tensor fills."""
        for path, rows in rows_of(self._checkpoint, self._config, name, uses):
            K = self._checkpoint.tensors[name].shape[1]
            try:
                self._weights[path] = self._quantise(path, rows, K)
            except ValueError as error:
                raise ConfigError(f"quantization: {name} cannot be quantised: {error}") from error

    def done(self) -> dict[str, QuantWeight]:
        """All weights, by path."""
        return self._weights

    def _quantise(self, path: str, rows: Rows, K: int) -> QuantWeight:
        name = "int8" if path == self._head else self._quantization
        if name not in QUANTISATIONS:
            return _rounded(jnp.asarray(rows[:]), format_here(name))
        arena = Arena(QUANTISATIONS[name].nbytes(len(rows), K))
        [packed] = arena.to_device({path: arena.quantise(rows, K, name)}).values()
        # One at a time: what is packed stays on the device until it has been laid out anew.
        return jax.block_until_ready(from_packed(packed))


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
