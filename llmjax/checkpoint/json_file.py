"""Reads JSON files with errors that say what is there instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointFormatError, ModelNotFoundError
from .sniff import describe

_NAMES: dict[type, str] = {dict: "object", list: "list"}


def read_json(path: Path, kind: type = dict) -> Any:
    """A JSON object from a file, or what `kind` says.

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
    if not isinstance(content, kind):
        raise CheckpointFormatError(
            f"{path} is not a JSON {_NAMES[kind]}{why}: it looks like {describe(path)}"
        )
    return content
