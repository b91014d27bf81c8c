"""Quantised folders keep their codes where kernels read them; nothing changes but by rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quant_files import awq_gemm_tensors, gptq_tensors, make_folder
from quant_oracles import check_choices, oracle

from llmjax import LLM, SamplingParams
from llmjax.checkpoint import convert, load_model
from llmjax.checkpoint.detect import open_checkpoint
from llmjax.errors import CheckpointFormatError, WeightMismatchError
from llmjax_kernels import native, triton_call
from llmjax_kernels.gpu import Gpu, compiling_for
from llmjax_kernels.packed import PackedWeight
from llmjax_kernels.quant_matmul import QuantWeight
from llmjax_kernels.weight_format import QUANTISATIONS

HALF = 2.0**-11
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
CASES = {
    "4 bits": (GPTQ, gptq_tensors, {}),
    "4 bits with zero points": (GPTQ, gptq_tensors, {"symmetric": False}),
    "4 bits in act-order": (GPTQ, gptq_tensors, {"act_order": True}),
    "3 bits by 16 in act-order": (
        GPTQ | {"bits": 3, "group_size": 16},
        gptq_tensors,
        {"bits": 3, "group": 16, "act_order": True},
    ),
    "8 bits": (GPTQ | {"bits": 8}, gptq_tensors, {"bits": 8}),
    "8 bits with zero points": (
        GPTQ | {"bits": 8, "group_size": -1},
        gptq_tensors,
        {"bits": 8, "group": -1, "symmetric": False},
    ),
    "AWQ": (AWQ, awq_gemm_tensors, {"symmetric": False}),
}
SIZES = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "num_gpu_blocks_override": 8,
    "token_buckets": (64,),
    "seq_buckets": (2,),
    "background": False,
}
needs_native = pytest.mark.skipif(not native.available(), reason="the native kernels are not there")
by_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture
def folder(tmp_path, tiny_model, case):
    settings, pack_as, how = CASES[case]
    made = make_folder(tmp_path / "model", tiny_model, settings, pack_as, **how)
    made.write()
    return made


def leaves(model):
    return {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(model.state)}


def by_parameter(folder):
    """The layers of a folder by the decoder's paths."""
    names = {"self_attn": "attn", "model.": "", "_proj": ""}
    found = {}
    for layer, expected in folder.layers.items():
        for old, new in names.items():
            layer = layer.replace(old, new)
        found[f"{layer}.weight"] = expected
    return found


@needs_native
@by_case
def test_native_kernels_get_the_codes(folder):
    model = load_model(folder.path, page_size=16, progress=False)
    assert model.native
    bits = next(iter(folder.layers.values())).bits
    method = folder.settings["quant_method"].upper()
    assert model.weight_type == f"{method} {bits} bits"
    found = leaves(model)
    for path, layer in by_parameter(folder).items():
        weight = found[path]
        assert isinstance(weight, PackedWeight)
        assert weight.format.bits == max(4, bits)
        most = 2.0**bits * layer.scales.astype(np.float32).max()
        np.testing.assert_allclose(weight.unpack(), layer.values, rtol=0, atol=HALF * most)
    assert found["embed.weight"].format.bits == 32


@by_case
def test_gpus_get_the_codes(folder, monkeypatch):
    monkeypatch.setattr(triton_call, "installed", lambda: True)
    monkeypatch.delenv("LLMJAX_KERNELS", raising=False)
    with compiling_for(Gpu(90, 132)):
        model = load_model(folder.path, progress=False)
    assert not model.native
    bits = next(iter(folder.layers.values())).bits
    for path, layer in by_parameter(folder).items():
        weight = leaves(model)[path]
        assert isinstance(weight, QuantWeight)
        assert weight.format.code == ("int8" if bits == 8 else "int4")
        most = 2.0**bits * layer.scales.astype(np.float32).max()
        values = jax.jit(QuantWeight.dequantise)(weight)
        np.testing.assert_allclose(values, layer.values, rtol=0, atol=HALF * most)
        np.testing.assert_array_equal(weight.rows(jnp.arange(3, 9)), values[3:9])
    ids = jnp.arange(3, 20, dtype=jnp.int32)
    logits = jax.jit(lambda state: nnx.merge(model.graphdef, state)(ids).logits)
    computed, expected = map(np.asarray, map(logits, (model.state, model.differentiable_state())))
    # Activations are bfloat16, or float32 as the embedding is.
    assert np.linalg.norm(computed - expected) < 0.02 * np.linalg.norm(expected)


@needs_native
@by_case
def test_is_served_natively(folder):
    """What the kernels say is what the dequantised weights say, but for 8-bit activations."""
    llm = LLM(str(folder.path), **SIZES)
    try:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
        [output] = llm.generate("the quick brown fox", params)
        ids = output.prompt_token_ids
        logits = np.asarray(llm.forward(ids).logits, np.float64)
    finally:
        llm.close()
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    found = [row[token].logprob for token, row in rows]
    expected = [logprobs[i, token] for i, token in enumerate(ids[1:])]
    # The relative error of a product, of which there are 16 behind one another or beside.
    error = 2.1 / 127 / np.sqrt(12) * np.sqrt(16) * logits.std()
    np.testing.assert_allclose(found, expected, rtol=0, atol=4 * error)


@needs_native
@pytest.mark.parametrize("name", ["gptq-w4-g32", "gptq-w4-asym", "gptq-w8-g32", "awq-w4-g32"])
def test_greedy_tokens_are_the_peers(name):
    folder = oracle(name)
    with LLM(str(folder), **SIZES) as llm:
        check_choices(llm, folder)


@needs_native
@pytest.mark.parametrize("case", ["4 bits in act-order"])
def test_what_is_left_as_floats_can_be_quantised(folder):
    model = load_model(folder.path, quantization="int8", page_size=16, progress=False)
    assert model.weight_type == "GPTQ 4 bits, others quantised to int8"
    formats = {path: w.format for path, w in leaves(model).items() if isinstance(w, PackedWeight)}
    ends = {path: formats.pop(path) for path in ("embed.weight", "head.weight")}
    assert set(ends.values()) == {QUANTISATIONS["int8"]}
    assert {f.bits for f in formats.values()} == {4}


@pytest.mark.parametrize("case", ["4 bits in act-order"])
def test_conversion_is_exact(folder, tmp_path):
    """float32, though the embedding is stored in bfloat16."""
    embed = folder.tensors["model.embed_tokens.weight"]
    folder.tensors["model.embed_tokens.weight"] = embed.astype(jnp.bfloat16)
    converted = open_checkpoint(convert(folder.write(), tmp_path / "orbax", progress=False))
    for path, layer in by_parameter(folder).items():
        assert converted.tensors[path].type_name == "F32"
        np.testing.assert_allclose(converted.read(path), layer.values, rtol=1e-6)


@needs_native
@pytest.mark.parametrize("case", ["4 bits"])
class TestRefused:
    def test_scales_that_are_not_finite(self, folder):
        name = "model.layers.1.mlp.down_proj"
        folder.tensors[f"{name}.scales"] = folder.tensors[f"{name}.scales"].copy()
        folder.tensors[f"{name}.scales"][1, 5] = np.inf
        with pytest.raises(CheckpointFormatError, match=rf"{name}.weight is damaged: .*finite"):
            load_model(folder.write(), page_size=16, progress=False)

    def test_a_bias_that_is_not_zero(self, folder):
        name = "model.layers.1.mlp.down_proj"
        folder.tensors[f"{name}.bias"] = np.zeros(64, np.float16)
        model = load_model(folder.write(), page_size=16, progress=False)
        assert not any(path.endswith("bias") for path in leaves(model))
        folder.tensors[f"{name}.bias"][3] = 1
        with pytest.raises(WeightMismatchError, match=rf"{name}\.bias"):
            load_model(folder.write(), page_size=16, progress=False)
