"""SmolLM2 as floats, quantised while it is loaded, against transformers' float32 perplexity.

Its file is quantised. Read as floats and stored with channels in another order, which leaves
the model what it was, the values of a group of 32 are on no grid any more.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_real_models import answers, mean_losses

from llmjax import LLM
from llmjax.bench.reorder import reordered
from llmjax.checkpoint import load_model, pull
from llmjax.checkpoint.detect import open_checkpoint
from llmjax.checkpoint.orbax_folder import write_orbax
from llmjax.errors import DownloadError
from llmjax_kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not there")


@pytest.fixture(scope="module")
def floats(tmp_path_factory) -> Path:
    try:
        source = pull("smollm2-135m-instruct", progress=False)
    except DownloadError as error:
        pytest.skip(f"SmolLM2 cannot be fetched here: {error}")
    model = load_model(source, dtype="float16", progress=False)
    leaves = nnx.to_flat_state(model.state)
    arrays = {".".join(map(str, keys)): np.asarray(leaf[...]) for keys, leaf in leaves}
    folder = tmp_path_factory.mktemp("floats") / "smollm2"
    folder.mkdir()
    write_orbax(folder, model.config, jax.tree.map(jnp.asarray, reordered(arrays, model.config)))
    open_checkpoint(source).copy_text_side(folder)
    return folder


def perplexity(folder: Path, quantization: str, windows: dict) -> float:
    sizes = {"max_model_len": 640, "token_buckets": (512,), "seq_buckets": (16,)}
    options = {"quantization": quantization, "max_num_seqs": 16, "background": False, **sizes}
    with LLM(str(folder), **options) as llm:
        return float(np.exp(np.mean(mean_losses(llm, windows))))


@pytest.mark.parametrize(("quantization", "rise"), [("int8", 0.005), ("int4", 0.25)])
def test_perplexity(floats, quantization, rise, record_property):
    windows = answers("smollm2-wikitext2-nll")
    expected = np.exp(np.mean(windows["per"]))
    found = perplexity(floats, quantization, windows)
    record_property("perplexity", found)
    assert abs(found / expected - 1) < rise
