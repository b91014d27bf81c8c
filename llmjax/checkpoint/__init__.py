"""Models from files: GGUF, safetensors, orbax, the catalogue and the hub."""

from ..catalogue import CATALOGUE
from .base import Checkpoint, TensorInfo
from .conversion import convert
from .detect import open_checkpoint
from .load import LoadedModel, load_model
from .resolve import cache_dir, pull, resolve_model

__all__ = [
    "CATALOGUE",
    "Checkpoint",
    "LoadedModel",
    "TensorInfo",
    "cache_dir",
    "convert",
    "load_model",
    "open_checkpoint",
    "pull",
    "resolve_model",
]
