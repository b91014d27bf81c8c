"""Reads JSON files with errors that say what is there instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointFormatError, ModelNotFoundError
from .sniff import describe


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelNotFoundError: the file does not exist.
        CheckpointFormatError: it holds something else; says what it looks like.
    """
    if not path.exists():
        raise ModelNotFoundError(f"{path} does not exist")
    why = ""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        content, why = None, f" ({error})"
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise CheckpointFormatError(
            f"{path} is not a JSON object{why}: it looks like {describe(path)}"
        )
    return content
