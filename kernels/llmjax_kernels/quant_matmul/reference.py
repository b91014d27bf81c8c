"""Products with quantised weights in plain XLA: the definition, and what runs anywhere."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .args import QuantMatmulArgs
from .inputs import grouped, quantise_rows
from .weight import numbers


def supports(args: QuantMatmulArgs) -> bool:
    """All there is."""
    return True


def run(args: QuantMatmulArgs) -> Float[Array, "M N"]:
    if args.weight.format.of_codes:
        return _of_codes(args).astype(args.out_dtype)
    x, weight, out_dtype = args.with_rounded_inputs()
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x,
        weight.dequantise().astype(x.dtype),
        (((1,), (1,)), ((), ())),
        precision=exact,
        preferred_element_type=jnp.float32,
    ).astype(out_dtype)


def _of_codes(args: QuantMatmulArgs) -> Float[Array, "M N"]:
    """Codes by codes, group by group."""
    x, weight, _ = args
    format = weight.format
    assert format.inputs is not None
    x_codes, x_scales = quantise_rows(x, format.inputs, weight.static_inputs)
    one, other = grouped(x_codes, format.group), weight.codes
    if format.code != "int8":
        one, other = numbers(one, format), numbers(other, format)  # their products are exact
    wide = jnp.int32 if format.code == "int8" else jnp.float32
    products = lax.dot_general(
        one,
        other,
        (((2,), (2,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=wide,
    )
    scaled = products * x_scales.T[:, :, None] * weight.scales[0][:, None, :]
    return jnp.sum(scaled, axis=0) * 2.0**weight.exponent
