"""Which backend multiplies with quantised weights, and how its work is cut."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax_kernels import triton_call
from llmjax_kernels.gpu import Gpu, compiling_for
from llmjax_kernels.quant_matmul import (
    FORMATS,
    InputFormat,
    QuantFormat,
    format_here,
    jax_triton,
    shapes,
    weight_shapes,
)
from llmjax_kernels.quant_matmul.args import QuantMatmulArgs

A100, H100 = Gpu(80, 108), Gpu(90, 132)
FP8_CODES = QuantFormat("fp8_e4m3", inputs=InputFormat("fp8_e4m3"))
ALL = [
    *FORMATS.values(),
    FP8_CODES,
    QuantFormat("fp8_e4m3", 128, inputs=InputFormat("fp8_e4m3", 128)),
]


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(triton_call, "installed", lambda: True)
    monkeypatch.delenv("LLMJAX_KERNELS", raising=False)


def arguments(M, N=4096, K=4096, format=FORMATS["int4"], dtype="bfloat16"):
    x = jax.ShapeDtypeStruct((M, K), dtype)
    return QuantMatmulArgs(x, weight_shapes(N, K, format), jnp.dtype(dtype))


def test_fp8_times_fp8_needs_a_gpu_that_has_it(installed):
    args = arguments(8, format=FP8_CODES)
    assert not jax_triton.supports(args)
    with compiling_for(A100):
        # There inputs are rounded, and multiplied as floats.
        assert jax_triton.supports(args)
        assert not jax_triton.multiplies_codes(FP8_CODES, A100)
        assert format_here("fp8") == FORMATS["fp8"]
    with compiling_for(H100):
        assert jax_triton.supports(args)
        assert jax_triton.multiplies_codes(FP8_CODES, H100)
        assert format_here("fp8") == FP8_CODES
        assert format_here("int8") == FORMATS["int8"]


def test_what_triton_does_not_support_is_left_to_xla(installed):
    with compiling_for(H100):
        assert jax_triton.supports(arguments(8, K=192, format=QuantFormat("int8", 64)))
        assert not jax_triton.supports(arguments(8, K=192, format=QuantFormat("int8", 96)))
        assert not jax_triton.supports(arguments(2**20))


@given(
    M=st.integers(1, 8192),
    N=st.integers(1, 20_000),
    K=st.integers(1, 20_000),
    format=st.sampled_from(ALL),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    gpu=st.sampled_from([A100, H100]),
)
def test_a_shape_is_one_that_matrix_units_take(M, N, K, format, dtype, gpu):
    shape = shapes.choose_shape(arguments(M, N, K, format, dtype), gpu)
    for block in (shape.block_m, shape.block_n, shape.block_k):
        assert block >= 16 and block & (block - 1) == 0
    assert format.group % shape.block_k == 0
    assert 1 <= shape.splits <= shapes.MOST_SPLITS
    # What is added up afterwards is no more than the inputs.
    assert shape.splits == 1 or shape.splits * M * shapes.PARTS_SHARE <= K


def test_few_rows_fill_the_chip_and_many_are_not_split():
    def programs(M, N, K):
        shape = shapes.choose_shape(arguments(M, N, K), H100)
        return -(-M // shape.block_m) * -(-N // shape.block_n) * shape.splits

    assert programs(1, 4096, 4096) >= 3 * H100.multiprocessors
    assert programs(1, 1024, 14336) >= H100.multiprocessors
    assert shapes.choose_shape(arguments(2048), H100).splits == 1
