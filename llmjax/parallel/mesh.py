"""The device mesh of an engine."""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh


def make_mesh(tensor: int = 1) -> Mesh:
    """A mesh of the first `tensor` devices along the axis "tensor".

    Raises:
        ValueError: fewer devices are visible.
    """
    devices = jax.devices()
    if tensor > len(devices):
        raise ValueError(f"a mesh of {tensor} devices was asked for, {len(devices)} are visible")
    return jax.make_mesh(
        (tensor,), ("tensor",), axis_types=(AxisType.Auto,), devices=devices[:tensor]
    )
