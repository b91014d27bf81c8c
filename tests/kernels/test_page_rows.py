"""Pages as rows, of pools as the reference and as the native kernels have them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import to_native

from llmjax_kernels.kv_format import KV_FORMATS
from llmjax_kernels.layout import PagedKV
from llmjax_kernels.page_rows import read_rows, to_pages

LAYERS, PAGES, SIZE, K, H = 2, 5, 32, 2, 16
IDS = jnp.array([3, 1, 4])


@pytest.mark.parametrize("name", [n for n in KV_FORMATS if n != "float16"])
def test_both_layouts_give_the_same_rows_and_take_them_back(name):
    format = KV_FORMATS[name]
    rng = np.random.default_rng(1)
    shape = (LAYERS, PAGES, SIZE, K, H)
    k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in "kv")
    native = to_native(*(np.asarray(format.encode(x)) for x in (k, v)), format)
    native = PagedKV(jnp.asarray(native.k), jnp.asarray(native.v), format)
    plain = [PagedKV(format.encode(k[i]), format.encode(v[i]), format) for i in range(LAYERS)]
    for layer in range(LAYERS):
        ours = read_rows(native, layer, IDS)
        theirs = read_rows(plain[layer], 0, IDS)
        for a, b, values in zip(ours, theirs, (k, v), strict=True):
            np.testing.assert_array_equal(
                format.decode(a, jnp.float32), format.decode(b, jnp.float32)
            )
            expected = values[layer, IDS].reshape(-1, K, H)
            step = 0.13 if "fp8" in name else 0.02
            np.testing.assert_allclose(format.decode(a, jnp.float32), expected, step, step)
        for kv, at in ((native, layer), (plain[layer], 0)):
            pages = to_pages(kv, *read_rows(kv, at, IDS))
            for given, leaf in zip(pages, (kv.k, kv.v), strict=True):
                expected = leaf[layer, IDS] if kv is native else leaf[IDS]
                np.testing.assert_array_equal(given, expected)
