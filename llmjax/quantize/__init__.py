"""Producing quantised models: `llmjax.quantize(src, dst, method)`, and a file a method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .config import METHODS, QuantizeConfig

__all__ = ["METHODS", "QuantizeConfig", "quantize"]


def quantize(
    src: str | Path, dst: str | Path, method: str, *, progress: bool = True, **settings: Any
) -> Path:
    """Writes a quantised copy of a model.

    What an interrupted run has done stays in a folder beside `dst`, and the same call goes on
    from there.

    Args:
        src: a catalogue name, a folder, a .gguf file or a hub id.
        dst: what to write; must not exist. It appears under its name when it is complete.
        method, settings: see `QuantizeConfig`.
        progress: show progress bars on stderr.

    Returns:
        `dst`.

    Raises:
        ConfigError: a setting is unknown, out of range or of no use to the method, or `dst`
            cannot be written.
        ModelLoadError: `src` cannot be loaded, or not be written in the format that was asked for.
    """
    from .writers import produce  # imports jax, which takes a second

    return produce(src, dst, QuantizeConfig.of(method, settings), progress=progress)
