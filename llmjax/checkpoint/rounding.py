"""Checkpoint matrices whose other factor is rounded too: they keep codes and scales."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from llmjax_kernels.quant_matmul import InputFormat, QuantFormat, QuantWeight, make_weight

from ..errors import UnsupportedModelError
from ..models.config import DecoderConfig
from ..quant import CodedRows, Coding, Inputs, QuantisedMatrix
from .base import Checkpoint
from .packing import matrices_of, rows_of
from .plan import Plan, Use


class CodeKeeper:
    """Keeps the matrices of a plan whose scheme rounds inputs (`QuantisedMatrix.inputs`).

    Args:
        plan: the tensors to read.
        wanted: the decoder's parameters, by path.

    Attributes:
        tensors: that it takes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        plan: Plan,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
    ):
        self._checkpoint, self._config, self._wanted = checkpoint, config, wanted
        self._weights: dict[str, QuantWeight] = {}
        found = checkpoint.matrices
        self.tensors = {
            name
            for name in matrices_of(plan, wanted)
            if name in found and found[name].inputs is not None
        }

    def add(self, name: str, uses: list[Use]) -> None:
        """Keeps what one tensor fills."""
        matrix = self._checkpoint.matrices[name]
        for path, rows in rows_of(self._checkpoint, self._config, name, uses, as_stored=True):
            coded = CodedRows.from_bytes(rows[:], matrix.shape[1], matrix.coding)
            try:
                weight = weight_of(coded, matrix)
            except ValueError as error:
                raise UnsupportedModelError(f"{name}: its inputs are rounded: {error}") from error
            device = self._wanted[path].sharding
            self._weights[path] = jax.block_until_ready(jax.device_put(weight, device))

    def done(self) -> dict[str, QuantWeight]:
        """All weights, by path."""
        return self._weights


def weight_of(rows: CodedRows, matrix: QuantisedMatrix) -> QuantWeight:
    """Rows of a matrix as products take them, without loss: integers as int8, floats as FP8.

    Raises:
        ValueError: its groups are too small.
    """
    assert matrix.inputs is not None
    coding, K = matrix.coding, matrix.shape[1]
    format = QuantFormat(
        "int8" if coding.table is None else "fp8_e4m3",
        coding.group if coding.group < K else 0,
        coding.minima,
        input_format(matrix.inputs),
    )
    codes, minima = _stored_codes(rows, coding)
    scales = jnp.asarray(rows.scales, jnp.float32).T
    static = _static(matrix.inputs) if format.inputs and format.inputs.needs_static else None
    return make_weight(
        jnp.asarray(codes),
        scales,
        format,
        minima=None if minima is None else jnp.asarray(minima, jnp.float32).T,
        static_inputs=static,
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


def _static(inputs: Inputs) -> jax.Array:
    return jnp.asarray([inputs.scale, inputs.zero], jnp.float32)


def _stored_codes(rows: CodedRows, coding: Coding) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes as `make_weight` takes them, and the minima that go with them."""
    if coding.table == "e4m3":
        return rows.codes, None
    if coding.table is not None:
        # The numbers of FP4 are among those of FP8.
        return coding.numbers(rows.codes).astype(jnp.float8_e4m3fn).view(np.uint8), None
    if rows.minima is None:
        return coding.numbers(rows.codes).astype(np.int8), None
    middle = 2 ** (coding.bits - 1)
    return rows.codes.astype(np.int16) - middle, rows.minima + middle * rows.scales
