"""Which devices of this process each copy of a model runs on."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from ..config import ParallelConfig
from ..errors import ConfigError


class Place(NamedTuple):
    """Devices that share each layer of a model.

    Attributes:
        device: the first of them.
        mesh: all of them, along the axis "tensor"; None where there is one.
    """

    device: jax.Device
    mesh: Mesh | None

    def sharding(self, spec: PartitionSpec) -> Sharding:
        """The layout of an array here."""
        if self.mesh is None:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, spec)


def make_places(config: ParallelConfig) -> list[tuple[Place, ...]]:
    """For each replica a place for each stage, no two of which have a device in common.

    Raises:
        ConfigError: fewer devices are visible, or a process would be left without one.
    """
    replicas, tensor = config.data_parallel_size, config.tensor_parallel_size
    stages = config.pipeline_parallel_size
    devices, count = jax.devices(), replicas * stages * tensor
    sizes = {
        "data_parallel_size": replicas,
        "pipeline_parallel_size": stages,
        "tensor_parallel_size": tensor,
    }
    asked = " times ".join(f"{name} is {n}" for name, n in sizes.items() if n > 1)
    if jax.process_count() > 1 and (tensor != len(devices) or count > tensor):
        raise ConfigError(
            f"{asked or 'tensor_parallel_size is 1'}, allowed: a tensor_parallel_size of "
            f"{len(devices)} alone, all devices of all {jax.process_count()} processes"
        )
    if count > len(devices):
        raise ConfigError(
            f"{asked}, allowed: up to {len(devices)}, the devices that JAX sees "
            f"({devices[0].device_kind})"
        )
    rows = [devices[i : i + tensor] for i in range(0, count, tensor)]
    places = [Place(row[0], _mesh(row)) for row in rows]
    return [tuple(places[i : i + stages]) for i in range(0, len(places), stages)]


def _mesh(devices: list[jax.Device]) -> Mesh | None:
    if len(devices) == 1:
        return None
    axis = AxisType.Auto
    return jax.make_mesh((len(devices),), ("tensor",), axis_types=(axis,), devices=devices)
