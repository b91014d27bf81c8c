"""Which backend multiplies with quantised weights."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..gpu import target
from . import divided, jax_triton, reference
from .args import QuantMatmulArgs
from .inputs import InputFormat
from .weight import FORMATS, QuantFormat, QuantWeight

BACKENDS = (jax_triton, reference)
"""The first that supports what is asked for computes it."""


def quant_matmul(
    x: Float[Array, "*M K"], weight: QuantWeight, out_dtype: jnp.dtype | None = None
) -> Float[Array, "*M N"]:
    """x W^T, accumulated in float32 (codes by codes of int8 in int32).

    Weights are rounded to x's type before they are multiplied, where codes are not multiplied
    by codes; what `QuantFormat.inputs` says is done to x first. Of a weight that several devices
    share each computes its part (divided.py).

    Args:
        out_dtype: of the result; by default x's.
    """
    rows, dtype = x.reshape(-1, x.shape[-1]), jnp.dtype(out_dtype or x.dtype)
    if weight.layout is None:
        y = _product(rows, weight, dtype)
    else:
        y = divided.multiply(_product, rows, weight, dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def quant_rows(weight: QuantWeight, ids: Int[Array, " R"]) -> Float[Array, "R K"]:
    """The float32 values of some rows, on one device or on each of several."""
    return weight.rows(ids) if weight.layout is None else divided.rows(weight, ids)


def _product(
    rows: Float[Array, "M K"], weight: QuantWeight, out_dtype: jnp.dtype
) -> Float[Array, "M N"]:
    if weight.order is not None:
        rows, weight = rows[:, weight.order], replace(weight, order=None)
    args = QuantMatmulArgs(rows, weight, out_dtype)
    backend = next(backend for backend in BACKENDS if backend.supports(args))
    return backend.run(args)


def format_here(name: str) -> QuantFormat:
    """What a name of `FORMATS` is here: FP8 times FP8 where the GPU multiplies it."""
    return with_quantised_inputs(FORMATS[name]) if name == "fp8" else FORMATS[name]


def with_quantised_inputs(format: QuantFormat) -> QuantFormat:
    """The format whose codes are multiplied by codes, where a GPU that is here does it."""
    of_codes = format._replace(inputs=InputFormat(format.code, format.group))
    gpu = target()
    capable = gpu is not None and jax_triton.multiplies_codes(of_codes, gpu)
    return of_codes if capable else format
