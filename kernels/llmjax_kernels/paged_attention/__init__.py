"""Causal attention of a ragged step over paged keys and values."""

from .args import AttentionArgs, AttentionSpec
from .dispatch import paged_attention, serving

__all__ = ["AttentionArgs", "AttentionSpec", "paged_attention", "serving"]
