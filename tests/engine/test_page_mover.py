"""Pages that are moved arrive whole, and the pool they lie in stays where it is."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from llmjax.cache.page_store import Copy, Load, Save
from llmjax.engine.page_mover import AT_ONCE, PageMover
from llmjax_kernels import native
from llmjax_kernels.kv_format import KV_FORMATS
from llmjax_kernels.layout import PagedKV
from llmjax_kernels.native.blocks import KV_TYPES, make_pages

PAGES, SLOTS, SIZE, HEADS, WIDTH = 40, 24, 16, 2, 32


def native_pools(format):
    if not native.available():
        pytest.skip("the native kernels are not built")
    return (make_pages(3, PAGES, SIZE, HEADS, WIDTH, format),), 1


def xla_pools(format):
    shape = (PAGES, SIZE, HEADS, format.width(WIDTH))
    zeros = np.zeros(shape, format.storage)
    return tuple(PagedKV(jax.device_put(zeros), jax.device_put(zeros), format) for _ in "12"), 0


CASES = [(native_pools, name) for name in KV_TYPES] + [(xla_pools, name) for name in KV_FORMATS]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def pools_and_axis(request):
    make, name = request.param
    return make(KV_FORMATS[name])


def filled(pools):
    """Random bytes in all pages."""
    rng = np.random.default_rng(0)
    leaves, treedef = jax.tree.flatten(pools)
    values = [
        rng.integers(0, 256, x.nbytes, np.uint8).view(x.dtype).reshape(x.shape) for x in leaves
    ]
    return jax.tree.unflatten(treedef, map(jax.device_put, values)), values


def bits(x):
    return np.ascontiguousarray(x).view(np.uint8)


def test_pages_arrive_whole_and_others_stay(pools_and_axis):
    pools, axis = pools_and_axis
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pools)
    mover = PageMover(shapes, axis=axis, num_slots=SLOTS)
    pools, expected = filled(pools)
    transfers = [Copy(i, i + 20) for i in range(AT_ONCE + 3)]  # more than a call takes
    transfers += [Save(20, 5), Save(7, 6), Copy(1, 7), Load(5, 39), Load(6, 0), Copy(0, 2)]
    pools = mover.run(pools, transfers)
    mover.settle()
    moves = [(i, i + 20) for i in range(AT_ONCE + 3)] + [(20, 39), (7, 0), (1, 7), (0, 2)]
    for values in expected:
        pages = np.moveaxis(values, axis, 0)
        before = pages.copy()
        for source, target in moves:
            pages[target] = before[7] if (source, target) == (7, 0) else pages[source]
    for leaf, values in zip(jax.tree.leaves(pools), expected, strict=True):
        np.testing.assert_array_equal(bits(leaf), bits(values))


def test_a_move_makes_no_copy_of_the_pool(pools_and_axis):
    pools, axis = pools_and_axis
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pools)
    small = PageMover(shapes, axis=axis, num_slots=SLOTS)
    many = [list(x.shape) for x in jax.tree.leaves(shapes)]
    for shape in many:
        shape[axis] *= 50
    leaves, treedef = jax.tree.flatten(shapes)
    wide = [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(many, leaves, strict=True)]
    large = PageMover(jax.tree.unflatten(treedef, wide), axis=axis, num_slots=SLOTS)
    for one, other in zip(small.programs, large.programs, strict=True):
        a, b = (p.memory_analysis().temp_size_in_bytes for p in (one, other))
        assert a == b  # what it takes beside the pool does not grow with it
