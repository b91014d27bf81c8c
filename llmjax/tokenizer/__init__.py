"""Text to token ids and back, chat templates, incremental detokenisation."""

from .chat import compile_template, template_variables
from .detokenizer import IncrementalDetokenizer
from .from_folder import tokenizer_from_folder
from .from_gguf import tokenizer_from_gguf
from .to_folder import write_tokenizer
from .to_gguf import gguf_tokenizer
from .tokenizer import Tokenizer

__all__ = [
    "IncrementalDetokenizer",
    "Tokenizer",
    "compile_template",
    "gguf_tokenizer",
    "template_variables",
    "tokenizer_from_folder",
    "tokenizer_from_gguf",
    "write_tokenizer",
]
