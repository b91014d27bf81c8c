"""What a native library was built from. hatch_build.py runs this file by itself."""

from __future__ import annotations

import hashlib
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
_SUFFIXES = (".cc", ".h", ".map")


def digest(folder: Path = SOURCES) -> str | None:
    """Of all sources there, which the library carries; None where an install has none."""
    paths = sorted(path for path in folder.glob("*") if path.suffix in _SUFFIXES)
    contents = hashlib.sha256()
    for path in paths:
        contents.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return contents.hexdigest() if paths else None
