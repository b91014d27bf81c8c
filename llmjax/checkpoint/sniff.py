"""Says what a file looks like when it is not what it should be."""

from __future__ import annotations

import json
import struct
from pathlib import Path

_MAGICS = (
    (b"PK\x03\x04", "a zip archive (a PyTorch pickle, a wheel, ...)"),
    (b"\x80\x02", "a Python pickle (an old PyTorch checkpoint)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\x89HDF", "an HDF5 file"),
    (b"lmgg", "a GGML file from before GGUF; convert the model again with llama.cpp"),
    (b"fmgg", "a GGML file from before GGUF; convert the model again with llama.cpp"),
    (b"tjgg", "a GGML file from before GGUF; convert the model again with llama.cpp"),
)


def describe(path: Path) -> str:
    """What the file at `path` seems to be, as a noun phrase; reads its first bytes only."""
    if path.is_dir():
        return "a directory"
    size = path.stat().st_size
    if size == 0:
        return "an empty file (an interrupted download?)"
    with path.open("rb") as file:
        head = file.read(512)
    for magic, meaning in _MAGICS:
        if head.startswith(magic):
            return meaning
    return _describe_binary(head, size) or _describe_text(head) or f"unknown ({head[:8]!r} ...)"


def _describe_binary(head: bytes, size: int) -> str | None:
    if head.startswith(b"GGUF"):
        return _describe_gguf(head)
    if len(head) > 8 and head[8:9] == b"{":
        (length,) = struct.unpack("<Q", head[:8])
        cut = "" if length + 8 <= size else ", truncated inside its header"
        if length < 1 << 32:
            return f"a safetensors file{cut}"
    return None


def _describe_gguf(head: bytes) -> str:
    if len(head) < 8:
        return "a GGUF file, truncated inside its header"
    (version,) = struct.unpack("<I", head[4:8])
    if version & 0xFFFF == 0:
        return "a big-endian GGUF file; convert it with gguf-convert-endian"
    return f"a GGUF file of version {version}"


def _describe_text(head: bytes) -> str | None:
    try:
        text = head.decode("utf-8", errors="strict" if len(head) < 512 else "ignore").strip()
    except UnicodeDecodeError:
        return None
    if not text or any(ord(c) < 32 and c not in "\t\n\r" for c in text):
        return None
    if text.startswith("version https://git-lfs"):
        return "a git-LFS pointer, not the file itself; run `git lfs pull` or download it again"
    if text.startswith("<"):
        return "an HTML or XML page (the download was answered with an error or a log-in page)"
    start = " ".join(text[:80].split())
    if text.startswith(("{", "[")):
        return f"a JSON document: {start}{_error_field(text)}"
    return f"plain text: {start}"


def _error_field(text: str) -> str:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        return ""
    is_error = isinstance(parsed, dict) and "error" in parsed
    return " (an error answer in place of a download)" if is_error else ""
