"""SmolLM2 as floats, written as Q4_K_M, beside the file that llama.cpp makes of the same floats."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from test_real_models import answers, mean_losses

from llmjax import LLM, quantize
from llmjax.checkpoint import convert, open_checkpoint, pull
from llmjax.errors import DownloadError
from llmjax_kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not there")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    try:
        source = pull("smollm2-135m-instruct", progress=False)
    except DownloadError as error:
        pytest.skip(f"SmolLM2 cannot be fetched here: {error}")
    folder = tmp_path_factory.mktemp("gguf")
    floats = convert(source, folder / "floats", dtype="float32", progress=False)
    return quantize(floats, folder / "smollm2.gguf", "gguf:Q4_K_M", progress=False)


@pytest.fixture(scope="module")
def theirs() -> dict:
    return answers("smollm2-q4_k_m")


def test_tensors_are_those_of_llama_cpp(written, theirs):
    checkpoint = open_checkpoint(written)
    found = {
        name: [
            info.type_name,
            hashlib.sha256(checkpoint._bytes(name, 0, info.shape[0])).hexdigest(),
        ]
        for name, info in checkpoint.tensors.items()
    }
    assert found == theirs["tensors"]


def test_perplexity_is_that_of_llama_cpp(written, theirs, record_property):
    sizes = {"max_model_len": 640, "token_buckets": (512,), "seq_buckets": (16,)}
    with LLM(str(written), max_num_seqs=16, background=False, **sizes) as llm:
        found = np.exp(np.mean(mean_losses(llm, answers("smollm2-wikitext2-nll"))))
    record_property("perplexity", float(found))
    assert abs(found / np.exp(np.mean(theirs["per"])) - 1) < 0.005
