"""How kernels' work is cut where that was measured: a JSON file beside this one for each kind of
device, which `llmjax tune` writes. Where there is none, or a size is not in it, rules decide.

    {"device": KIND, "OP": {"SIZE": {FIELD: NUMBER, ...}, ...}, ...}
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

Entries = Mapping[str, Mapping[str, int]]
"""How work is cut, by its size."""


def path_of(kind: str, folder: Path | None = None) -> Path:
    """The file of a kind of device ("NVIDIA H100 80GB HBM3"); by default where kernels look."""
    return (folder or FOLDER) / (re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") + ".json")


def entries(kind: str, op: str) -> Entries:
    """What was measured of an op; nothing for a kind of device that has no file."""
    return _read(path_of(kind)).get(op, {}) if kind else {}


def save(kind: str, op: str, found: Entries, folder: Path | None = None) -> Path:
    """Adds to what is known of a kind of device, or replaces it; the file."""
    path = path_of(kind, folder)
    known = _read(path)
    both = dict(known.get(op, {})) | dict(found)
    data = {"device": kind, **known, op: dict(sorted(both.items()))}
    path.write_text(json.dumps(data, indent=2) + "\n")
    _read.cache_clear()
    return path


@functools.cache
def _read(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
