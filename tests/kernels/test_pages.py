"""New pages are zeros, whatever lay there before, and take memory once they are written."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from llmjax_kernels.kv_format import KV_FORMATS
from llmjax_kernels.native.blocks import make_pages

LAYERS, PAGE, HEADS, WIDTH = 2, 16, 1, 16
PAGE_FLOATS = LAYERS * PAGE * HEADS * WIDTH


@pytest.mark.parametrize("num_pages", [1, 7, 8, 31, 4001])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_are_zeros_where_other_values_were(num_pages, name):
    format = KV_FORMATS[name]
    for _ in range(3):
        old = [jnp.full(num_pages * PAGE_FLOATS, jnp.nan, jnp.float32) for _ in range(4)]
        jax.block_until_ready(old)
        del old
        kv = make_pages(LAYERS, num_pages, PAGE, HEADS, WIDTH, format)
        for pages in (kv.k, kv.v):
            assert pages.dtype == format.storage
            assert pages.size == num_pages * PAGE_FLOATS // WIDTH * format.width(WIDTH)
            assert not np.asarray(pages).view(np.uint8).any()


@pytest.mark.skipif(not Path("/proc").exists(), reason="only Linux is known to give pages back")
def test_take_memory_once_they_are_written():
    process = psutil.Process()
    write = jax.jit(lambda pages: pages.at[0, 5].set(7), donate_argnums=0)
    jax.block_until_ready(write(make_pages(LAYERS, 8, PAGE, HEADS, WIDTH, KV_FORMATS["float32"]).k))
    before = process.memory_info().rss
    kv = jax.block_until_ready(
        make_pages(LAYERS, 1 << 16, PAGE, HEADS, WIDTH, KV_FORMATS["float32"])
    )
    assert kv.k.nbytes == 1 << 27
    write = write.lower(jax.ShapeDtypeStruct(kv.k.shape, kv.k.dtype)).compile()
    place = kv.k.unsafe_buffer_pointer()
    written = write(kv.k)
    assert written.unsafe_buffer_pointer() == place  # donated, as to a step
    assert process.memory_info().rss - before < 1 << 26
    assert float(written[0, 5].min()) == 7
