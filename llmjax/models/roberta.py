"""RoBERTa and XLM-RoBERTa (BGE-M3, multilingual E5, BGE rerankers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .bert import encoder_table, read_encoder
from .encoder import EncoderConfig

_NAMES = ("Roberta", "XLMRoberta")
SCORERS = tuple(f"{name}ForSequenceClassification" for name in _NAMES)
ARCHITECTURES = (*(f"{n}{head}" for n in _NAMES for head in ("Model", "ForMaskedLM")), *SCORERS)
GGUF_ARCHITECTURES = ()
WEIGHTS = encoder_table("roberta.", "classifier.dense", "classifier.out_proj")


def read_config(c: Mapping[str, Any]) -> EncoderConfig:
    # Positions count from the row after that of padding, a quirk of its first implementation.
    return read_encoder(c, scorers=SCORERS, position_offset=1 + c.get("pad_token_id", 1))
