"""What every backend of `quant_matmul` takes."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from .weight import QuantWeight


class QuantMatmulArgs(NamedTuple):
    """The arguments of `quant_matmul`."""

    x: Float[Array, "M K"]
    weight: QuantWeight
    out_dtype: jnp.dtype
