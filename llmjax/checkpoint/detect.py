"""Opens whatever a path holds."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointFormatError, ModelNotFoundError
from .architecture import hf_family
from .base import Checkpoint
from .gguf_file import GGUFCheckpoint, split_parts
from .json_file import read_json
from .safetensors_folder import CONFIG, INDEX, SINGLE, SafetensorsCheckpoint

MARKER = "llmjax.json"
"""The file that tells a folder of `llmjax convert`."""
_ALLOWED = (
    f"a .gguf file, a folder with {CONFIG} and {SINGLE} (or {INDEX}), "
    "or a folder that `llmjax convert` wrote"
)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a .gguf file, a safetensors folder, an orbax folder, or a folder with one GGUF model.

    Reads headers only.

    Raises:
        ModelNotFoundError: nothing is at `path`.
        CheckpointFormatError: it is none of these, or damaged; says what it looks like.
        UnsupportedModelError: a GGUF tensor's type is not known at all.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ModelNotFoundError(f"{path} does not exist; expected {_ALLOWED}")
    if not path.is_dir():
        return GGUFCheckpoint(path)
    if (path / MARKER).exists():
        from .orbax_folder import OrbaxCheckpoint  # orbax takes 26 MB and 0.2 s

        return OrbaxCheckpoint(path)
    if (path / SINGLE).exists() or (path / INDEX).exists():
        return SafetensorsCheckpoint(path)
    return GGUFCheckpoint(_only_gguf(path))


def _only_gguf(folder: Path) -> Path:
    files = [f for f in sorted(folder.glob("*.gguf")) if not f.name.startswith("mmproj")]
    models = sorted({split_parts(f)[0] for f in files})
    if len(models) == 1:
        return models[0]
    if models:
        names = ", ".join(m.name for m in models)
        raise CheckpointFormatError(f"{folder} holds several GGUF models, name one: {names}")
    if (folder / CONFIG).exists():
        # Of an architecture that is not implemented, weights would not help.
        hf_family(read_json(folder / CONFIG), folder / CONFIG)
    raise CheckpointFormatError(f"{folder} holds no model: {_held(folder)}; expected {_ALLOWED}")


def _held(folder: Path) -> str:
    names = sorted(f.name for f in folder.iterdir())
    if any(n.endswith((".bin", ".pt", ".pth")) for n in names):
        return "it has PyTorch pickles, which are not read; convert them to safetensors"
    shards = [n for n in names if n.endswith(".safetensors")]
    if shards:
        return f"it has {', '.join(shards[:5])}, but no {INDEX} that says what is where"
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    if CONFIG in names:
        return f"it has {shown}, but no weights"
    return f"it has {shown}" if names else "it is empty"
