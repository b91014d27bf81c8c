"""What a page keeps of a key or value: floats, or 8 bits a channel and a scale a row.

A row is one position's key (or value) of one head. In 8 bits its greatest magnitude becomes
the greatest value of the format: nothing is calibrated, and what a row becomes depends on
nothing but the row. FP8 is that of Micikevicius et al. 2022 (OCP OFP8).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

SCALE_BYTES = 4


class KVFormat(NamedTuple):
    """One way to keep keys and values.

    Attributes:
        dtype: of what is kept; of a code where there is a scale.
        most: the greatest value of a code; 0 where there are no scales.
    """

    name: str
    dtype: np.dtype
    most: float = 0.0

    @property
    def is_scaled(self) -> bool:
        return self.most > 0

    @property
    def storage(self) -> np.dtype:
        """Of the arrays of pages: codes and scales lie together as bytes, 16-bit floats as
        integers, for XLA on a CPU widens arrays of these to change a row of them, all of it."""
        if self.is_scaled:
            return np.dtype(np.uint8)
        return np.dtype(np.uint16) if self.dtype.itemsize == 2 else self.dtype

    def width(self, head_dim: int) -> int:
        """Elements of a row in a page."""
        return head_dim + SCALE_BYTES if self.is_scaled else head_dim

    def row_bytes(self, head_dim: int) -> int:
        return self.width(head_dim) * self.storage.itemsize

    def encode(self, rows: Float[Array, "*n H"]) -> Array:
        """Rows as pages keep them, [*n width]; the scale comes last."""
        if not self.is_scaled:
            return lax.bitcast_convert_type(rows.astype(self.dtype), self.storage)
        rows = rows.astype(jnp.float32)
        largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
        scale = largest / self.most
        codes = rows * jnp.where(largest > 1e-30, self.most / largest, 0)
        codes = jnp.clip(codes, -self.most, self.most)
        if self.dtype == jnp.int8:
            codes = jnp.round(codes)
        bits = lax.bitcast_convert_type(codes.astype(self.dtype), jnp.uint8)
        return jnp.concatenate([bits, lax.bitcast_convert_type(scale[..., 0], jnp.uint8)], -1)

    def decode(self, rows: Array, dtype: np.dtype) -> Float[Array, "*n H"]:
        """The values of rows as pages keep them."""
        if not self.is_scaled:
            return lax.bitcast_convert_type(rows, self.dtype)
        codes = lax.bitcast_convert_type(rows[..., :-SCALE_BYTES], self.dtype)
        scale = lax.bitcast_convert_type(rows[..., -SCALE_BYTES:], jnp.float32)
        return (codes.astype(jnp.float32) * scale[..., None]).astype(dtype)


KV_FORMATS = {
    f.name: f
    for f in (
        KVFormat("float32", np.dtype(np.float32)),
        KVFormat("float16", np.dtype(np.float16)),
        KVFormat("bfloat16", np.dtype(jnp.bfloat16)),
        KVFormat("int8", np.dtype(np.int8), 127.0),
        KVFormat("fp8_e4m3", np.dtype(jnp.float8_e4m3fn), 448.0),
        KVFormat("fp8_e5m2", np.dtype(jnp.float8_e5m2), 57344.0),
    )
}
"""By the names of `--kv-cache-dtype`."""
