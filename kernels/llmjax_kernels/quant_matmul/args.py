"""What every backend of `quant_matmul` takes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from .inputs import round_rows
from .weight import QuantWeight


class QuantMatmulArgs(NamedTuple):
    """The arguments of `quant_matmul`."""

    x: Float[Array, "M K"]
    weight: QuantWeight
    out_dtype: jnp.dtype

    def with_rounded_inputs(self) -> QuantMatmulArgs:
        """The same product, but for x, which has been rounded already, to its own type at last."""
        x, weight = self.x, self.weight
        if weight.format.inputs is None:
            return self
        rounded = round_rows(x, weight.format.inputs, weight.static_inputs).astype(x.dtype)
        plain = replace(weight, format=weight.format._replace(inputs=None), static_inputs=None)
        return self._replace(x=rounded, weight=plain)
