"""Choosing tokens on the device."""

from .adjust import BiasTable, mask_words
from .logprobs import Logprobs, token_logprobs
from .rows import SamplingRows
from .sampler import SampledTokens, sample

__all__ = [
    "BiasTable",
    "Logprobs",
    "SampledTokens",
    "SamplingRows",
    "mask_words",
    "sample",
    "token_logprobs",
]
