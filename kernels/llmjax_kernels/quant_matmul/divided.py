"""Weights that several devices share, and what each does with its part.

`QuantWeight.layout` says of the matrix [N, K] what that of one of floats would say: which mesh axis
its outputs are divided over, and which its inputs. Codes, scales and minima follow it. Inputs are
divided by whole groups (of a scale for all of a row, anywhere); each device then has a part of
every sum, and these are added up over the devices in float32.

Where a weight has its inputs in another order (`QuantWeight.order`) and they are divided, those of
a device may be anybody's: it is given all of x, and takes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from .weight import QuantFormat, QuantWeight, weight_shapes

Product = Callable[[Array, QuantWeight, jnp.dtype], Array]
"""(x [M, K], weight, type of the result) -> [M, N], on one device."""


def multiply(
    product: Product, x: Float[Array, "M K"], weight: QuantWeight, out_dtype: jnp.dtype
) -> Float[Array, "M N"]:
    """`product`, each device with its part; divided by outputs if the weight is, else whole.

    Args:
        x: divided by inputs if the weight is, and has them in their own order; else whole.
    """
    outputs, inputs = _axes(weight.layout)
    out = PartitionSpec(None, outputs)
    if inputs is None:
        return _on_parts(lambda x, w: product(x, w, out_dtype), x, weight, PartitionSpec(), out)

    def partial_sums(x: Array, part: QuantWeight) -> Array:
        y = product(x, _with_scales_of_all(part, inputs), jnp.dtype(jnp.float32))
        return lax.psum(y, inputs).astype(out_dtype)

    given = PartitionSpec() if weight.order is not None else PartitionSpec(None, inputs)
    return _on_parts(partial_sums, x, weight, given, out)


def rows(weight: QuantWeight, ids: Int[Array, " R"]) -> Float[Array, "R K"]:
    """`QuantWeight.rows` of a weight that is divided by outputs, if at all; whole everywhere."""
    outputs, inputs = _axes(weight.layout)
    assert inputs is None

    def own(ids: Array, part: QuantWeight) -> Array:
        if outputs is None:
            return part.rows(ids)
        place = ids - lax.axis_index(outputs) * part.shape[0]
        here = (place >= 0) & (place < part.shape[0])
        values = part.rows(jnp.where(here, place, 0))
        return lax.psum(jnp.where(here[:, None], values, 0), outputs)

    return _on_parts(own, ids, weight, PartitionSpec(), PartitionSpec())


def join(
    parts: Mapping[jax.Device, QuantWeight], shape: tuple[int, int], layout: NamedSharding
) -> QuantWeight:
    """One weight of the parts that the devices of this process have.

    Args:
        parts: of one format and exponent.
        shape: (N, K) of all of it.
        layout: of which these are the parts.
    """
    [one, *_] = parts.values()
    arrays: dict[str, Any] = {}
    for name, spec in _specs(one.format, layout).items():
        own = [getattr(part, name) for part in parts.values()]
        if own[0] is not None:
            sharding = NamedSharding(layout.mesh, spec)
            arrays[name] = jax.make_array_from_single_device_arrays(
                _whole_shape(own[0].shape, sharding), sharding, own
            )
    return replace(one, shape=shape, layout=layout, **arrays)


def divided_shapes(N: int, K: int, format: QuantFormat, layout: NamedSharding) -> QuantWeight:
    """`weight_shapes` of a weight that is laid out so."""
    shapes = replace(weight_shapes(N, K, format), layout=layout)
    arrays: dict[str, Any] = {}
    for name, spec in _specs(format, layout).items():
        if (array := getattr(shapes, name)) is not None:
            sharding = NamedSharding(layout.mesh, spec)
            arrays[name] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    return replace(shapes, **arrays)


def _axes(layout: NamedSharding | None) -> tuple[Any, Any]:
    """What outputs are divided over, and inputs."""
    assert layout is not None
    outputs, inputs, *_ = (*layout.spec, None, None)
    return outputs, inputs


def _specs(format: QuantFormat, layout: NamedSharding) -> dict[str, PartitionSpec]:
    """Of each array of a weight."""
    outputs, inputs = _axes(layout)
    groups, within = (inputs, None) if format.group else (None, inputs)
    return {
        "codes": PartitionSpec(groups, outputs, within),
        "scales": PartitionSpec(None, groups, outputs),
        "units": PartitionSpec(None, groups, outputs),
        "order": PartitionSpec(inputs),
        "static_inputs": PartitionSpec(),
    }


def _whole_shape(part: tuple[int, ...], sharding: NamedSharding) -> tuple[int, ...]:
    axes = (*sharding.spec, *[None] * len(part))
    return tuple(n * (sharding.mesh.shape[a] if a else 1) for n, a in zip(part, axes, strict=False))


def _on_parts(
    function: Callable[[Array, QuantWeight], Array],
    x: Array,
    weight: QuantWeight,
    given: PartitionSpec,
    out: PartitionSpec,
) -> Array:
    """function(x, weight) of each device's part.

    Args:
        given: the layout of x.
        out: that of the result.
    """
    layout = weight.layout
    assert layout is not None
    specs = _specs(weight.format, layout)
    arrays = {name: own for name in specs if (own := getattr(weight, name)) is not None}
    N, K = layout.shard_shape(weight.shape)

    def call(x: Array, arrays: dict[str, Any]) -> Array:
        return function(x, replace(weight, shape=(N, K), layout=None, **arrays))

    return jax.shard_map(
        call,
        mesh=layout.mesh,
        in_specs=(given, {name: specs[name] for name in arrays}),
        out_specs=out,
        check_vma=False,
    )(x, arrays)


def _with_scales_of_all(part: QuantWeight, axis: str) -> QuantWeight:
    """Inputs that are rounded by what is in all of a row: by what all devices have of it."""
    inputs = part.format.inputs
    if inputs is None or inputs.group or inputs.static:
        return part
    return replace(part, format=part.format._replace(inputs=inputs._replace(axis=axis)))
