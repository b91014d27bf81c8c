"""The device mesh of an engine."""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh

from ..errors import ConfigError


def make_mesh(tensor: int) -> Mesh | None:
    """A mesh of the first `tensor` devices along the axis "tensor"; None for a single one.

    Raises:
        ConfigError: fewer devices are visible, or a process would be left without one.
    """
    count = jax.process_count()
    if tensor == 1 and count == 1:
        return None
    devices = jax.devices()
    if count > 1 and tensor != len(devices):
        raise ConfigError(
            f"tensor_parallel_size is {tensor}, allowed: {len(devices)}, all devices of all "
            f"{count} processes"
        )
    if tensor > len(devices):
        raise ConfigError(
            f"tensor_parallel_size is {tensor}, allowed: up to {len(devices)}, the devices that "
            f"JAX sees ({devices[0].device_kind})"
        )
    return jax.make_mesh(
        (tensor,), ("tensor",), axis_types=(AxisType.Auto,), devices=devices[:tensor]
    )
