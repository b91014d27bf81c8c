"""Which backend computes paged attention."""

from __future__ import annotations

from jaxtyping import Array, Float

from ..layout import PagedKV, RaggedBatch
from ..triton_call import available
from . import jax_triton, mosaic_gpu, reference
from .args import AttentionArgs, AttentionSpec

BACKENDS = (mosaic_gpu, jax_triton, reference)
"""The first that supports what is asked for computes it."""


def serving() -> str:
    """What computes a step here, for people."""
    if not available():
        return "XLA"
    mosaic = "Mosaic GPU and " if mosaic_gpu.serves() else ""
    return f"{mosaic}Triton attention, XLA"


def paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv: PagedKV,
    batch: RaggedBatch,
    spec: AttentionSpec,
    sinks: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "T N H"], PagedKV]:
    """Writes the step's keys and values into their pages, then attends to all before.

    Scores and sums are float32. Padding tokens write nothing; what their rows of the
    result hold is finite and unspecified.

    Args:
        sinks: see `AttentionArgs`. The native CPU kernels, which compute whole layers, have none.

    Returns:
        The attention output, in q's dtype, and the updated pages.
    """
    args = AttentionArgs(q, k, v, kv, batch, spec, sinks)
    backend = next(backend for backend in BACKENDS if backend.supports(args))
    return backend.run(args)
