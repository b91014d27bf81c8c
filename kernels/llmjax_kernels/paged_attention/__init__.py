"""Causal attention of a ragged step over paged keys and values."""

from .reference import AttentionSpec, paged_attention

__all__ = ["AttentionSpec", "paged_attention"]
