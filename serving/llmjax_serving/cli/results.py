"""Files that a command writes when it is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmjax.errors import ConfigError


def require_writable(flag: str, file: Path | None) -> None:
    """Raises ConfigError, before any work is done, where its result could not be written."""
    if file is None:
        return
    try:
        target = file.resolve()  # what a link points to is what would be made
        is_new = not target.exists()
        target.open("a").close()
        # A command that fails on the way leaves nothing behind.
        if is_new:
            target.unlink()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot write {flag} {file}: {error}") from error


def write_json(flag: str, file: Path | None, content: dict[str, Any]) -> None:
    """Writes a file, where one was asked for.

    Raises:
        ConfigError: it cannot be written.
    """
    if file is None:
        return
    try:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {flag} {file}: {error}") from error
