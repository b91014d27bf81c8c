"""What every backend of paged attention takes."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float

from ..layout import PagedKV, RaggedBatch


class AttentionSpec(NamedTuple):
    """Arithmetic of one layer's attention.

    Attributes:
        scale: multiplies q.k.
        window: tokens that a token sees, itself counted; None is all before it.
        softcap: c * tanh(score / c) where not None.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class AttentionArgs(NamedTuple):
    """The arguments of `paged_attention`.

    Attributes:
        sinks: of each query head, the score of a key that every token sees besides and whose
            value is zero (gpt-oss; not scaled, not capped).
    """

    q: Float[Array, "T N H"]
    k: Float[Array, "T K H"]
    v: Float[Array, "T K H"]
    kv: PagedKV
    batch: RaggedBatch
    spec: AttentionSpec
    sinks: Float[Array, " N"] | None = None
