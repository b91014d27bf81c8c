"""Model families. A new family is one file and one entry in FAMILIES."""

from . import llama
from .config import DecoderConfig
from .decoder import Decoder, ForwardOutput

FAMILIES = (llama,)

__all__ = ["FAMILIES", "Decoder", "DecoderConfig", "ForwardOutput"]
