"""Models from files: GGUF, safetensors, orbax, the catalogue and the hub."""

from ..catalogue import CATALOGUE
from .base import Checkpoint, TensorInfo
from .conversion import convert
from .detect import open_checkpoint
from .load import load_model
from .load_pooling import PoolingModel, load_pooling_model
from .loaded import LoadedModel
from .pooling import PoolingConfig, pooling_of
from .resolve import cache_dir, pull, resolve_model

__all__ = [
    "CATALOGUE",
    "Checkpoint",
    "LoadedModel",
    "PoolingConfig",
    "PoolingModel",
    "TensorInfo",
    "cache_dir",
    "convert",
    "load_model",
    "load_pooling_model",
    "open_checkpoint",
    "pooling_of",
    "pull",
    "resolve_model",
]
