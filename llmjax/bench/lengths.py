"""Whether a load fits a context, before anything is computed. No jax."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ConfigError


def require_room(context: int, lengths: Mapping[str, int], *, beside: int = 0) -> None:
    """Raises ConfigError where lengths, by the names of their flags, do not fit together.

    Args:
        context: tokens of a prompt and its output.
        beside: tokens that are there whatever the flags say.
    """
    asked, most = sum(lengths.values()), context - beside
    if asked > most:
        raise ConfigError(
            f"{' + '.join(lengths)} is {asked}, allowed: up to {most}, as the context has "
            f"{context} tokens (max_model_len)"
        )
