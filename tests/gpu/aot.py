"""Compiling for an NVIDIA GPU where there is none: no driver, no libcuda.

One process compiles for one target: caches within it do not ask which.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the plugin loads without libcuda
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)
from targets import Target

from llmjax_kernels.gpu import compiling_for


def make_mesh(target: Target) -> Mesh:
    """One device that is not there."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target.config(), topology="1x1x1"
    )
    return topologies.make_mesh(topology, (1,), ("tensor",))


def compile_for(
    target: Target, mesh: Mesh, function: Any, *shapes: Any, donate: tuple[int, ...] = ()
) -> Any:
    """function(*shapes), compiled; shapes are pytrees of `jax.ShapeDtypeStruct`."""
    whole = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes)
    with _tracing_for(target, mesh), compiling_for(target.gpu):
        traced = jax.jit(function, donate_argnums=donate).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).compile()


@contextlib.contextmanager
def _tracing_for(target: Target, mesh: Mesh) -> Iterator[None]:
    device = AbstractDevice(
        device_kind=target.name, num_cores=target.gpu.multiprocessors, platform="gpu"
    )
    axes = {"axis_types": mesh.axis_types, "abstract_device": device}
    with use_abstract_mesh(AbstractMesh(mesh.devices.shape, mesh.axis_names, **axes)):
        yield
