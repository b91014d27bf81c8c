"""Which mesh axis each parameter axis is laid out over, as two tables.

Parameters have logical axes by their last path components; logical axes have mesh axes.
Tensor parallelism after Megatron-LM: heads and mlp channels are split, so that a layer
needs one sum after attention and one after the feed-forward block.
"""

from __future__ import annotations

from jax.sharding import Mesh, NamedSharding, PartitionSpec

PARAMETER_AXES: dict[str, tuple[str | None, ...]] = {
    "embed.weight": ("vocab", None),
    "head.weight": ("vocab", None),
    "attn.q.weight": ("queries", None),
    "attn.q.bias": ("queries",),
    "attn.k.weight": ("kv_heads", None),
    "attn.k.bias": ("kv_heads",),
    "attn.v.weight": ("kv_heads", None),
    "attn.v.bias": ("kv_heads",),
    "attn.o.weight": (None, "heads"),
    "mlp.gate.weight": ("mlp", None),
    "mlp.gate.bias": ("mlp",),
    "mlp.up.weight": ("mlp", None),
    "mlp.up.bias": ("mlp",),
    "mlp.down.weight": (None, "mlp"),
}
"""Logical axes by the end of a parameter's path; what is not listed is replicated. Queries have the
channels of heads, but other ones where heads are added (partition.py)."""

MESH_AXES: dict[str, str] = {
    "vocab": "tensor",
    "heads": "tensor",
    "queries": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}


HEADS = PartitionSpec(None, "tensor", None)
"""Of queries, keys and values, [T, heads, H]."""
LOGITS = PartitionSpec(None, "tensor")
"""[rows, V]: each device keeps the columns of its own tokens."""
KV_PAGES = PartitionSpec(None, None, "tensor", None)
"""Of a layer's pages, [pages, page_size, K, W]: each device keeps its own heads."""


def logical_axes(path: str) -> tuple[str | None, ...]:
    """The logical axes of the parameter at `path` ("layers.0.attn.q.weight")."""
    parts = path.split(".")
    return PARAMETER_AXES.get(".".join(parts[-3:])) or PARAMETER_AXES.get(".".join(parts[-2:]), ())


def parameter_sharding(path: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The layout of the parameter at `path` over `mesh`.

    An axis that its mesh axis does not divide is replicated.
    """
    spec = []
    for axis, size in zip(logical_axes(path), shape, strict=False):
        name = MESH_AXES.get(axis or "")
        divides = name in mesh.shape and size % mesh.shape[name] == 0
        spec.append(name if divides else None)
    return NamedSharding(mesh, PartitionSpec(*spec))
