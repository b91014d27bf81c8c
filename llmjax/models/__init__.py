"""Model families. A new family is one file and one entry in FAMILIES."""

import jax.numpy as jnp

from . import bert, gemma2, gemma3, granite, llama, mistral, olmo2, phi3, qwen2, qwen3, roberta
from .config import DecoderConfig
from .decoder import Decoder, ForwardOutput, Stage
from .encoder import Encoder, EncoderConfig

FAMILIES = (llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3, granite, olmo2, bert, roberta)


def make_model(config: DecoderConfig | EncoderConfig, dtype: jnp.dtype) -> Decoder | Encoder:
    """The module of a configuration."""
    if isinstance(config, EncoderConfig):
        return Encoder(config, dtype)
    return Decoder(config, dtype)


__all__ = [
    "FAMILIES",
    "Decoder",
    "DecoderConfig",
    "Encoder",
    "EncoderConfig",
    "ForwardOutput",
    "Stage",
    "make_model",
]
