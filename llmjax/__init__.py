"""llmjax: a JAX/XLA inference engine for large language models.

from llmjax import LLM, SamplingParams

llm = LLM("smollm2-135m-instruct")
print(llm.generate("The capital of France is")[0].outputs[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Now, not on demand: importing their rooms later would put these in the place of the functions.
from .advise import advise
from .beam_search import BeamSearchParams
from .message import ChatMessage, ToolCall
from .output import CompletionOutput, Logprob, RequestOutput
from .pooled import EmbeddingOutput, PoolingOutput, RerankOutput, ScoreOutput
from .quantize import quantize
from .request import RequestOptions, SamplingParams
from .structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from .llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "ChatMessage",
    "CompletionOutput",
    "EmbeddingOutput",
    "Logprob",
    "PoolingOutput",
    "RequestOptions",
    "RequestOutput",
    "RerankOutput",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputs",
    "ToolCall",
    "advise",
    "quantize",
]


def __getattr__(name: str) -> object:
    # Importing jax takes a second: only those who load a model pay for it.
    if name == "LLM":
        from .llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
