"""Moving a page touches no other one."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from llmjax.engine.page_mover import PageMover
from llmjax_kernels.kv_format import KV_FORMATS
from llmjax_kernels.layout import PagedKV

PAGES, REST = 613, (4, 2, 16)


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("axis", [0, 1])
def test_no_program_computes_anything_of_all_pages(name, axis):
    format = KV_FORMATS[name]
    shape = (PAGES, *REST) if axis == 0 else (3, PAGES, *REST)
    pool = jax.ShapeDtypeStruct(shape, format.storage)
    pools = (PagedKV(pool, pool, format),)
    mover = PageMover(pools, axis=axis, num_slots=4)
    dims = ",".join(map(str, shape))
    for program in (mover._copy, mover._gather, mover._scatter):
        work = re.findall(rf"\[{dims}\]\S* (\S*convert|copy|select)\(", program.as_text())
        assert not work
    for program in (mover._copy, mover._scatter):
        assert program.memory_analysis().alias_size_in_bytes >= 2 * pool.size * pool.dtype.itemsize


def test_the_check_above_sees_what_short_floats_cost():
    """On a CPU; that is why pages keep their bits."""
    if jax.default_backend() != "cpu":
        pytest.skip("accelerators have short floats")
    pool = jax.ShapeDtypeStruct((PAGES, *REST), jnp.bfloat16)
    pools = (PagedKV(pool, pool, KV_FORMATS["bfloat16"]),)
    text = PageMover(pools, axis=0, num_slots=4)._scatter.as_text()
    assert re.search(rf"\[{PAGES},4,2,16\]\S* \S*convert\(", text)
