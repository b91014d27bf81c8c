"""Windows of calibration text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from ..checks import shown
from ..errors import ConfigError
from ..tokenizer import Tokenizer
from .config import QuantizeConfig


def calibration_windows(config: QuantizeConfig, tokenizer: Tokenizer) -> Int[np.ndarray, "S T"]:
    """Token ids of windows that are evenly spaced over the text.

    Each begins with what the model wants a text to begin with (BOS), as texts that it serves do.

    Raises:
        ConfigError: the file cannot be read, or holds less than a window of text.
    """
    assert config.calibration and config.num_samples and config.sequence_length
    ids = tokenizer.encode(_read(Path(config.calibration).expanduser(), tokenizer), False)
    begin = tokenizer.prefix
    width = config.sequence_length - len(begin)
    if width > len(ids):
        raise ConfigError(
            f"calibration is {config.calibration!r}, a text of {len(ids)} tokens, allowed: a "
            f"sequence_length ({config.sequence_length}) or more"
        )
    count = min(config.num_samples, len(ids) // width)
    starts = np.linspace(0, len(ids) - width, count).astype(int)
    return np.array([[*begin, *ids[start : start + width]] for start in starts], np.int32)


def _read(path: Path, tokenizer: Tokenizer) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"calibration is {str(path)!r}, which cannot be read: {error}") from error
    if path.suffix != ".jsonl":
        return text
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n\n".join(
        _of_line(line, f"{path}, line {number}", tokenizer)
        for number, line in enumerate(lines, start=1)
    )


def _of_line(line: str, where: str, tokenizer: Tokenizer) -> str:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"calibration: {where} is not JSON: {error}") from error
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        return entry["text"]
    if isinstance(entry, dict) and isinstance(entry.get("messages"), list):
        return tokenizer.render_chat(entry["messages"], add_generation_prompt=False)
    raise ConfigError(
        f'calibration: {where} is {shown(entry)}, allowed: an object with "text", a string, or '
        '"messages", a list'
    )
