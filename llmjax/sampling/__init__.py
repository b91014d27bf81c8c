"""Choosing tokens on the device."""

from .adjust import BiasTable
from .logprobs import Logprobs, token_logprobs
from .rows import SamplingRows
from .sampler import SampledTokens, sample

__all__ = ["BiasTable", "Logprobs", "SampledTokens", "SamplingRows", "sample", "token_logprobs"]
