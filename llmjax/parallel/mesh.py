"""The device mesh of an engine."""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh

from ..errors import ConfigError


def make_mesh(tensor: int = 1) -> Mesh:
    """A mesh of the first `tensor` devices along the axis "tensor".

    Raises:
        ConfigError: fewer devices are visible.
    """
    devices = jax.devices()
    if tensor > len(devices):
        raise ConfigError(
            f"tensor_parallel_size is {tensor}, allowed: up to {len(devices)}, the devices that "
            f"JAX sees ({devices[0].device_kind})"
        )
    return jax.make_mesh(
        (tensor,), ("tensor",), axis_types=(AxisType.Auto,), devices=devices[:tensor]
    )
