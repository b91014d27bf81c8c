"""Quantised matrices are dealt out whole: no place is lost, and no group is torn."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from llmjax.checkpoint.dividing import deal, unit_of
from llmjax.parallel.partition import Sizes, partition
from llmjax_kernels.quant_matmul import InputFormat, QuantFormat

HIDDEN = 32
BY_INPUTS = ("attn.o.weight", "mlp.down.weight")
BY_OUTPUTS = ("attn.q.weight", "mlp.up.weight")
FORMATS = [
    QuantFormat("int4", 16, minima=True),
    QuantFormat("int4", 64, minima=True),
    QuantFormat("int8", 96),
    QuantFormat("int8"),
    QuantFormat("fp8_e4m3", 64, inputs=InputFormat("fp8_e4m3", 64)),
    QuantFormat("int8", 64, minima=True, inputs=InputFormat("int8")),
]


@given(
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([8, 16, 32, 48]),
    blocks=st.integers(1, 5),
    devices=st.integers(2, 8),
    format=st.sampled_from(FORMATS),
    path=st.sampled_from([*BY_INPUTS, *BY_OUTPUTS]),
    ordered=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_product_is_what_it_was(
    group, kv_heads, head_dim, blocks, devices, format, path, ordered, seed
):
    unit, rng = unit_of(format), np.random.default_rng(seed)
    sizes = Sizes(group * kv_heads, kv_heads, head_dim, blocks * unit)
    divided, sources, _ = partition(sizes, devices, unit)
    N, K, axis = shape_of(path, divided)
    outputs, inputs, _ = shape_of(path, sizes)
    if inputs % (format.group or 1):  # no checkpoint has it
        return
    order = rng.permutation(inputs) if ordered else None
    mesh = AbstractMesh((devices,), ("tensor",))
    found = deal(path, (N, K), format, order, sources, mesh)

    stored = rng.standard_normal((outputs, inputs))  # in the order of codes
    values = np.where(found.places < 0, 0, stored[:, found.places])
    values = np.where(found.rows[:, None] < 0, 0, values[found.rows])
    x = rng.standard_normal(inputs)
    expected = stored @ (x if order is None else x[order])
    here = dealt(x, sources.get(axis)) if path in BY_INPUTS else x
    y = values @ (here if found.order is None else here[found.order])
    kept = found.rows >= 0
    np.testing.assert_allclose(y[kept], expected[found.rows[kept]])
    assert not y[~kept].any()

    # Groups are of neighbours in the checkpoint, or of zeros; each device has whole ones.
    if size := found.format.group:
        assert format.group % size == 0
        units = found.places[: K // size * size].reshape(-1, size)
        same = (units // format.group == units[:, :1] // format.group) & (units >= 0)
        assert (same.all(1) | (units < 0).all(1)).all()
    if found.is_divided and found.layout.spec[0] is None:
        assert K % devices == 0 and K // devices % unit_of(found.format) == 0
    if found.order is not None:
        assert sorted(found.order) == list(range(K))


def shape_of(path, sizes):
    """N and K of a parameter, and which axis is divided."""
    width = sizes.num_heads * sizes.head_dim
    return {
        "attn.o.weight": (HIDDEN, width, "heads"),
        "attn.q.weight": (width, HIDDEN * 6, "queries"),
        "mlp.down.weight": (HIDDEN, sizes.mlp_size, "mlp"),
        "mlp.up.weight": (sizes.mlp_size, HIDDEN * 6, "mlp"),
    }[path]


def dealt(x, source):
    return x if source is None else np.where(source < 0, 0, x[source])


def test_groups_stay_as_they_are_where_that_can_be():
    mesh, format = AbstractMesh((8,), ("tensor",)), QuantFormat("int4", 128, minima=True)
    sizes = Sizes(64, 8, 128, 29568)  # Qwen2.5 72B
    divided, sources, _ = partition(sizes, 8, unit_of(format))
    assert divided.mlp_size == 29696
    down = deal("mlp.down.weight", (8192, 29696), format, None, sources, mesh)
    out = deal("attn.o.weight", (8192, 8192), format, None, sources, mesh)
    assert (down.format, out.format) == (format, format)
    assert down.order is None and out.order is None


def test_heads_of_half_a_group_cut_it():
    """Qwen2.5 0.5B on two devices: 7 heads of 64 each."""
    mesh, format = AbstractMesh((2,), ("tensor",)), QuantFormat("int4", 128, minima=True)
    found = deal("attn.o.weight", (896, 896), format, None, {}, mesh)
    assert found.format == format._replace(group=64) and found.order is None


def test_what_has_no_groups_for_each_device_is_whole_on_all():
    mesh, format = AbstractMesh((2,), ("tensor",)), QuantFormat("int4", 16, minima=True)
    found = deal("attn.o.weight", (32, 16), format, None, {}, mesh)
    assert not found.is_divided and found.order is None
