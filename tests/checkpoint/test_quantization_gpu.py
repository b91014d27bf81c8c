"""Float checkpoints that are quantised for GPUs while they are loaded; none need be here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from tiny_files import hf_tensors, parameters, write_folder

from llmjax.checkpoint import load_model
from llmjax.errors import ConfigError
from llmjax_kernels import native, triton_call
from llmjax_kernels.gpu import Gpu, compiling_for
from llmjax_kernels.packed import quantise
from llmjax_kernels.quant_matmul import FORMATS, InputFormat, QuantWeight

A100, H100 = Gpu(80, 108), Gpu(90, 132)
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
needs_native = pytest.mark.skipif(not native.available(), reason="the native kernels are not there")


@pytest.fixture
def folder(tmp_path, tiny_model):
    tensors = {n: v / 8 if v.ndim == 2 else np.ones_like(v) for n, v in hf_tensors().items()}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    stored = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    return write_folder(tmp_path, stored, **WIDE), parameters(stored)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(triton_call, "installed", lambda: True)
    monkeypatch.delenv("LLMJAX_KERNELS", raising=False)


def load(path, quantization, gpu=H100, **options):
    with compiling_for(gpu):
        return load_model(path, quantization=quantization, progress=False, **options)


def leaves(model):
    return {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(model.state)}


@needs_native
def test_the_codes_are_those_of_the_cpu(folder):
    path, expected = folder
    model = load(path, "int4")
    assert model.weight_type == "quantised to int4"
    assert not model.native
    assert model.dtype == model.kv_format.dtype == ml_dtypes.bfloat16
    weights = {n: w for n, w in leaves(model).items() if expected[n].ndim == 2}
    packed = {}
    for name, weight in weights.items():
        kind = "int8" if name == "head.weight" else "int4"
        assert weight.format == FORMATS[kind]
        packed[name] = quantise(expected[name], kind)
        assert weight.nbytes <= packed[name].nbytes, name
    found = jax.jit(lambda ws: {n: w.dequantise() for n, w in ws.items()})(weights)
    alone = jax.jit(lambda ws: {n: w.unpack() for n, w in ws.items()})(packed)
    for name, values in alone.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_fp8_leaves_the_ends_alone_and_rounds_inputs_where_the_gpu_multiplies_it(folder):
    path, expected = folder
    for gpu, of_codes in ((A100, False), (H100, True)):
        for name, weight in leaves(load(path, "fp8", gpu)).items():
            if expected[name].ndim == 1 or name in ("embed.weight", "head.weight"):
                assert not isinstance(weight, QuantWeight)
                continue
            assert weight.format == FORMATS["fp8"]._replace(
                inputs=InputFormat("fp8_e4m3") if of_codes else None
            )
            exact = expected[name].astype(np.float32)
            # The greatest codes are 32 apart.
            most = np.abs(exact).max(-1, keepdims=True) * 16.01 / 448
            assert (np.abs(weight.dequantise() - exact) <= most).all()


@pytest.mark.parametrize("quantization", ["fp8", pytest.param("int8", marks=needs_native)])
def test_a_model_of_them_computes_what_its_values_say(folder, quantization):
    model = load(folder[0], quantization, A100)
    ids = jnp.arange(3, 20, dtype=jnp.int32)
    logits = jax.jit(lambda state: nnx.merge(model.graphdef, state)(ids).logits)
    found, expected = map(np.asarray, map(logits, (model.state, model.differentiable_state())))
    # Activations are bfloat16.
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


class TestRefused:
    def test_fp8_on_a_cpu(self, folder):
        path, _ = folder
        said = "native CPU kernels" if not native.available() else "on a CPU: int8, int4"
        with pytest.raises(ConfigError, match=f"quantization is 'fp8'.*{said}"):
            load_model(path, quantization="fp8", page_size=16, progress=False)

    def test_without_triton(self, folder, monkeypatch):
        monkeypatch.setattr(triton_call, "installed", lambda: False)
        with pytest.raises(ConfigError, match=r"'int4': only the native CPU .* and Triton's"):
            load(folder[0], "int4")

    def test_what_is_not_finite(self, folder, tmp_path):
        tensors = hf_tensors()
        name = next(n for n in tensors if "down_proj" in n)
        tensors[name][3, 3] = np.inf
        path = write_folder(tmp_path, tensors, **WIDE)
        with pytest.raises(ConfigError, match=rf"{name} cannot be quantised: .*not finite"):
            load(path, "fp8")

    @needs_native
    def test_rows_that_are_no_whole_groups(self, tiny_model):
        with pytest.raises(ConfigError, match=r"quantization is 'int4'.*groups of 32"):
            load(tiny_model, "int4")

    def test_where_the_native_library_is_missing(self, folder, monkeypatch):
        monkeypatch.setattr(native, "_LIBRARY", native._LIBRARY.with_name("missing.so"))
        native.library.cache_clear()
        try:
            with pytest.raises(ConfigError, match="'int8', but the native library cannot"):
                load(folder[0], "int8")
        finally:
            monkeypatch.undo()
            native.library.cache_clear()
