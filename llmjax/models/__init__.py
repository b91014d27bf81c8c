"""Model families. A new family is one file and one entry in FAMILIES."""

from . import gemma2, gemma3, granite, llama, mistral, olmo2, phi3, qwen2, qwen3
from .config import DecoderConfig
from .decoder import Decoder, ForwardOutput, Stage

FAMILIES = (llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3, granite, olmo2)

__all__ = ["FAMILIES", "Decoder", "DecoderConfig", "ForwardOutput", "Stage"]
