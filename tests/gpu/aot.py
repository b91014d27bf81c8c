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


def make_mesh(target: Target, devices: int = 1) -> Mesh:
    """Devices of a host that are not there."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target.config(), topology=f"1x1x{devices}"
    )
    return topologies.make_mesh(topology, (devices,), ("tensor",))


def compile_for(
    target: Target,
    mesh: Mesh,
    function: Any,
    *shapes: Any,
    donate: tuple[int, ...] = (),
    out: Any = None,
    dump: str | None = None,
) -> Any:
    """function(*shapes), compiled.

    Args:
        shapes: pytrees of `jax.ShapeDtypeStruct`; what has no layout is whole on each device.
        out: layouts of the results, where XLA is not to choose.
        dump: a folder into which XLA writes what it made.
    """
    options = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True} if dump else None
    whole = NamedSharding(mesh, PartitionSpec())

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or whole)

    args = jax.tree.map(placed, shapes)
    with _tracing_for(target, mesh), compiling_for(target.gpu):
        traced = jax.jit(function, donate_argnums=donate, out_shardings=out).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).compile(options)


@contextlib.contextmanager
def _tracing_for(target: Target, mesh: Mesh) -> Iterator[None]:
    device = AbstractDevice(
        device_kind=target.name, num_cores=target.gpu.multiprocessors, platform="gpu"
    )
    axes = {"axis_types": mesh.axis_types, "abstract_device": device}
    with use_abstract_mesh(AbstractMesh(mesh.devices.shape, mesh.axis_names, **axes)):
        yield
