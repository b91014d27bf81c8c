"""From a checkpoint to a model that pools its hidden states into one vector."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding

from ..config import check_weight_types
from ..models import DecoderConfig, EncoderConfig
from ..tokenizer import Tokenizer
from .base import Checkpoint
from .load import load_weights, plain_dtype
from .pooling import PoolingConfig

_UNUSED = re.compile(r"^(cls|lm_head|output)\.|(^|\.)(position_ids|token_type_ids)$|(^|\.)pooler\.")
"""Heads for other tasks, and buffers; but for those that the model's head is read from."""


@dataclass(frozen=True)
class PoolingModel:
    """A model in memory, and what becomes of its hidden states.

    Attributes:
        dtype: of weights and activations.
    """

    config: DecoderConfig | EncoderConfig
    pooling: PoolingConfig
    graphdef: nnx.GraphDef
    state: nnx.State
    dtype: jnp.dtype
    tokenizer: Tokenizer

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
        return sum(x.nbytes for x in jax.tree.leaves(self.state))


def load_pooling_model(
    checkpoint: Checkpoint, pooling: PoolingConfig, *, dtype: str = "auto", progress: bool = True
) -> PoolingModel:
    """Loads an encoder, or a decoder without its head, onto the first device.

    Args:
        dtype: see `load_model`; XLA serves, so quantised weights are expanded.

    Raises:
        ModelLoadError: the subclass says what is wrong.
        ConfigError: `dtype` is none of these.
    """
    check_weight_types(dtype, None)
    config, table = checkpoint.read_architecture()
    if isinstance(config, DecoderConfig):
        config = replace(config, tie_embeddings=True)
    text = checkpoint.read_text_side()
    chosen = plain_dtype(dtype, checkpoint, table)
    read = {source.name for source in table.values()} if pooling.task == "score" and table else ()
    checkpoint.tensors = {
        name: info
        for name, info in checkpoint.tensors.items()
        if name in read or not _UNUSED.search(name)
    }
    device = SingleDeviceSharding(jax.local_devices()[0])
    weights = load_weights(
        checkpoint, config, table, chosen, lambda path, shape: device, progress=progress
    )
    return PoolingModel(config, pooling, *weights, chosen, text.tokenizer)
