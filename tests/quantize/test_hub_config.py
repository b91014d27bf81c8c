"""GGUF sources become folders as the hub has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layer_fixtures import FIXTURES
from safetensors.numpy import load_file

from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.architecture import architecture_from_hf
from llmjax.checkpoint.base import Checkpoint
from llmjax.checkpoint.json_file import read_json
from llmjax.checkpoint.text import text_from_folder
from llmjax.errors import UnsupportedModelError
from llmjax.models import DecoderConfig
from llmjax.quantize import quantize
from llmjax.quantize.hub import hub_family
from llmjax.quantize.hub_config import hub_config

TWINS = {
    "llama3": "llama3",
    "smollm2": "smollm2",
    "mistral": "mistral/full",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2/head_scalar",
    "gemma3": "gemma3/linear",
    "granite": "granite",
    "olmo2": "olmo2",
}
"""The folder that each GGUF file was written from."""


def decoder_of(checkpoint: Checkpoint) -> DecoderConfig:
    config, _ = checkpoint.read_architecture()
    assert isinstance(config, DecoderConfig)
    return config


@pytest.mark.parametrize("name", TWINS)
def test_reads_as_the_folder_that_it_was(name):
    config = decoder_of(open_checkpoint(FIXTURES / "gguf" / f"{name}.gguf"))
    path = FIXTURES / TWINS[name] / "config.json"
    twin, _ = architecture_from_hf(path, read_json(path))
    found = hub_family(config).read_config(hub_config(config))
    for field, wanted in vars(twin).items():
        ours = getattr(found, field)
        if field == "ropes":
            kinds = [[(r.kind, r.dim, r.theta) for r in ropes] for ropes in (ours, wanted)]
            assert kinds[0] == kinds[1]
            assert [r.factor for r in ours] == pytest.approx([r.factor for r in wanted])
        elif isinstance(wanted, float):
            assert ours == pytest.approx(wanted, rel=1e-6), field  # GGUF has float32
        elif field != "architecture":  # Mistral is a Llama there
            assert ours == wanted, field


def test_what_config_json_cannot_say_is_an_error():
    config = decoder_of(open_checkpoint(FIXTURES / "smollm2"))
    with pytest.raises(UnsupportedModelError, match=r"logits_softcap is 30.0 \(read back as None"):
        hub_config(replace(config, logits_softcap=30.0))
    odd = replace(config.ropes[0], freq_factors=tuple([3.0] * (config.ropes[0].dim // 2)))
    with pytest.raises(UnsupportedModelError, match="ropes"):
        hub_config(replace(config, ropes=(odd,) * config.num_layers))


def test_a_gguf_file_becomes_a_folder_with_a_tokenizer(tmp_path):
    source = FIXTURES / "gguf" / "smollm2.gguf"
    quantize(source, tmp_path / "out", "int8", progress=False, dtype="float32")
    text = open_checkpoint(source).read_text_side()
    found, wanted = text_from_folder(tmp_path / "out").tokenizer, text.tokenizer
    assert found.eos_token_ids == wanted.eos_token_ids
    assert found.encode("ab c <s> é") == wanted.encode("ab c <s> é")
    assert found.chat_template == wanted.chat_template


def test_rows_of_gguf_are_put_in_the_hubs_order(tmp_path):
    """GGUF keeps rotary pairs side by side: the same weights come of either source."""
    settings = {"progress": False, "dtype": "float32", "ignore": ["lm_head", "re:.*"]}
    quantize(FIXTURES / "smollm2", tmp_path / "folder", "int8", **settings)
    quantize(FIXTURES / "gguf" / "smollm2.gguf", tmp_path / "gguf", "int8", **settings)
    one, other = (
        {
            k: v
            for file in (tmp_path / name).glob("*.safetensors")
            for k, v in load_file(file).items()
        }
        for name in ("folder", "gguf")
    )
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)
