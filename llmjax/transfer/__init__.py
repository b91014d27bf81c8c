"""Prompts to another engine, and the pages of keys and values that come back. No jax."""
