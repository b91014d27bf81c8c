"""BERT: sentence embeddings (MiniLM, BGE, E5, GTE) and cross-encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModelError
from .encoder import EncoderConfig
from .hf_config import activation, required
from .weights import WeightTable, weight_table

SCORERS = ("BertForSequenceClassification",)
ARCHITECTURES = ("BertModel", "BertForMaskedLM", *SCORERS)
GGUF_ARCHITECTURES = ()

_LAYER = {
    **{
        f"attn.{p}": f"attention.self.{n}"
        for p, n in zip("qkv", ("query", "key", "value"), strict=True)
    },
    "attn.o": "attention.output.dense",
    "attn_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


def encoder_table(prefix: str, dense: str, out: str) -> WeightTable:
    """The tensors of BERT and of what is named after it.

    Args:
        prefix: of all but the head.
        dense, out: the two layers of the head.
    """
    names = {
        "embed": "embeddings.word_embeddings",
        "position": "embeddings.position_embeddings",
        "type": "embeddings.token_type_embeddings",
        "norm": "embeddings.LayerNorm",
        **{f"layers.{{i}}.{m}": f"encoder.layer.{{i}}.{n}" for m, n in _LAYER.items()},
    }
    inner = {module: prefix + name for module, name in names.items()}
    return weight_table({**inner, "score.dense": dense, "score.out": out}, {})


WEIGHTS = encoder_table("bert.", "bert.pooler.dense", "classifier")


def read_config(c: Mapping[str, Any]) -> EncoderConfig:
    return read_encoder(c, scorers=SCORERS)


def read_encoder(
    c: Mapping[str, Any], *, scorers: tuple[str, ...], position_offset: int = 0
) -> EncoderConfig:
    """An EncoderConfig of a config.json.

    Raises:
        UnsupportedModelError: positions or an activation that are not implemented, or a head
            for classes.
        CheckpointFormatError: a required key is missing.
    """
    kind = c.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise UnsupportedModelError(
            f"position_embedding_type {kind!r} is not implemented, allowed: absolute"
        )
    architecture = c["architectures"][0]
    labels = len(c.get("id2label") or ()) or c.get("num_labels", 2)
    if architecture in scorers and labels != 1:
        raise UnsupportedModelError(
            f"{architecture} with {labels} labels is not implemented, allowed: 1, a score"
        )
    return EncoderConfig(
        architecture=architecture,
        vocab_size=required(c, "vocab_size"),
        hidden_size=required(c, "hidden_size"),
        num_layers=required(c, "num_hidden_layers"),
        num_heads=required(c, "num_attention_heads"),
        mlp_size=required(c, "intermediate_size"),
        max_position=required(c, "max_position_embeddings") - position_offset,
        position_offset=position_offset,
        num_types=c.get("type_vocab_size", 2),
        norm_eps=c.get("layer_norm_eps", 1e-12),
        activation=activation(c.get("hidden_act") or "gelu"),  # type: ignore[arg-type]
        scores=architecture in scorers,
    )
