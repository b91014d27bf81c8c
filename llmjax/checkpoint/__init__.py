"""Models from files: GGUF, safetensors, orbax, the catalogue and the hub."""

from .base import Checkpoint, TensorInfo
from .convert import convert
from .load import LoadedModel, load_model
from .open import open_checkpoint

__all__ = [
    "Checkpoint",
    "LoadedModel",
    "TensorInfo",
    "convert",
    "load_model",
    "open_checkpoint",
]
