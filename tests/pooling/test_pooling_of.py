"""Which models pool, by what their files say; and who refuses those that do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmjax.checkpoint import convert, load_model, open_checkpoint, pooling_of
from llmjax.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.errors import ConfigError, UnsupportedModelError

from .conftest import HERE

MODELS = HERE.parent / "models" / "fixtures"


def copied(name: str, folder: Path, **config: object) -> Path:
    """A fixture with another config.json and no more than transformers writes."""
    shutil.copytree(HERE / "fixtures" / name, folder)
    (folder / "modules.json").unlink(missing_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def test_who_generates_does_not_pool_unless_asked():
    for path in (MODELS / "qwen3", MODELS / "gguf" / "qwen3.gguf"):
        checkpoint = open_checkpoint(path)
        assert pooling_of(checkpoint) is None
        asked = pooling_of(checkpoint, "mean")
        assert (asked.mode, asked.task, asked.normalize) == ("mean", "embed", True)
        with pytest.raises(ConfigError, match="last or mean"):
            pooling_of(checkpoint, "cls")


@pytest.mark.parametrize(("kind", "mode"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_gguf_says_how_to_pool(kind, mode):
    checkpoint = open_checkpoint(MODELS / "gguf" / "qwen3.gguf")
    checkpoint.config = {**checkpoint.config, "qwen3.pooling_type": kind}
    assert pooling_of(checkpoint).mode == mode
    checkpoint.config["qwen3.pooling_type"] = 9
    with pytest.raises(UnsupportedModelError, match="pooling_type 9"):
        pooling_of(checkpoint)


def test_without_sentence_transformers_files(tmp_path):
    bert = open_checkpoint(copied("bert", tmp_path / "bert"))
    assert (pooling_of(bert).mode, pooling_of(bert, "cls").mode) == ("mean", "cls")
    qwen = open_checkpoint(copied("qwen3", tmp_path / "qwen3"))
    assert pooling_of(qwen).mode == "last"


def test_what_a_scorer_may_ask_for(tmp_path):
    scorer = open_checkpoint(HERE / "fixtures" / "roberta-scorer")
    assert pooling_of(scorer).activation == "identity"
    with pytest.raises(ConfigError, match="allowed for XLMRobertaForSequenceClassification: cls"):
        pooling_of(scorer, "mean")
    softmax = {"sentence_transformers": {"activation_fn": "torch.nn.Softmax"}}
    with pytest.raises(UnsupportedModelError, match="Softmax"):
        pooling_of(open_checkpoint(copied("bert-scorer", tmp_path / "a", **softmax)))
    labels = {"id2label": {"0": "yes", "1": "no"}}
    with pytest.raises(UnsupportedModelError, match="2 labels"):
        pooling_of(open_checkpoint(copied("bert-scorer", tmp_path / "b", **labels)))


def test_an_encoder_is_no_decoder(tmp_path):
    folder = HERE / "fixtures" / "bert"
    for load in (lambda: load_model(folder), lambda: convert(folder, tmp_path / "out")):
        with pytest.raises(UnsupportedModelError, match="BertModel is an encoder, which gives"):
            load()


def test_an_engine_that_generates_does_not_pool():
    with pytest.raises(ConfigError, match="pooling is 'mean'"):
        Engine(EngineConfig.of(str(MODELS / "qwen3"), pooling="mean"))
