"""Models from the Hugging Face hub, through its own library and cache."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.auto import tqdm

from ..catalogue import CatalogueEntry
from ..errors import DownloadError, ModelNotFoundError
from .gguf_file import split_parts
from .wheels import check_sha256

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<file>[^:]+\.gguf))?")
_WANTED = ["*.safetensors", "*.json", "tokenizer*", "*.jinja"]
_UNWANTED = ["consolidated*", "*/*.safetensors", "[!0-9]*/*.json"]
"""Second copies of the weights in other layouts. 1_Pooling/config.json is none."""


class _SilentBar(tqdm):
    def __init__(self, *args: object, **kwargs: object):
        super().__init__(*args, **(kwargs | {"disable": True}))


def fetch_from_hub(hub_id: str, *, progress: bool = True) -> Path:
    """Fetches `org/name`, or one GGUF model `org/name:file.gguf`, unless it is there already.

    Returns:
        The folder, or the GGUF file (of a split model, the part that was named).

    Raises:
        ModelNotFoundError: the hub has no such repository or file.
        DownloadError: the hub cannot be reached, or refuses.
    """
    match = HUB_ID.fullmatch(hub_id)
    if match is None:
        raise ModelNotFoundError(f"{hub_id!r} is no hub id; expected org/name[:file.gguf]")
    repo, file = match["repo"], match["file"]
    if file is None:
        folder = _snapshot(repo, _WANTED, progress=progress)
        if not any(folder.glob("*.safetensors")):
            raise ModelNotFoundError(f"{repo} has no safetensors files on the hub{_offer(repo)}")
        return folder
    folder = _snapshot(repo, [str(part) for part in split_parts(Path(file))], progress=progress)
    if not (folder / file).exists():
        raise ModelNotFoundError(f"{repo} has no file {file!r} on the hub{_offer(repo)}")
    return folder / file


def cached_from_hub(hub_id: str) -> Path | None:
    """What the hub's cache has of `org/name`, a folder with its config.json, or of
    `org/name:file.gguf`; None where it has neither. Nothing is fetched."""
    match = HUB_ID.fullmatch(hub_id)
    if match is None:
        return None
    found = huggingface_hub.try_to_load_from_cache(match["repo"], match["file"] or "config.json")
    if not isinstance(found, str):  # it may be known that there is no such file
        return None
    return Path(found) if match["file"] else Path(found).parent


def fetch_entry_from_hub(entry: CatalogueEntry, folder: Path, *, progress: bool) -> None:
    """Puts a catalogue model's file into `folder`; continues what an earlier call began.

    Raises:
        DownloadError: it cannot be had, or its checksum is wrong.
    """
    if entry.hub is None:
        raise DownloadError(f"{entry.name} is not on the hub")
    repo, file, revision = entry.hub.repo, entry.hub.file, entry.hub.revision
    log.info("fetching %s from the hub's %s", entry.name, repo)
    partial = folder / "hub"
    try:
        got = _snapshot(repo, [file], progress=progress, revision=revision, into=partial) / file
    except ModelNotFoundError as error:
        raise DownloadError(str(error)) from error
    if not got.exists():
        raise DownloadError(f"{repo} has no file {file!r} on the hub")
    with got.open("rb") as source:
        found = hashlib.file_digest(source, "sha256").hexdigest()
    try:
        check_sha256(found, entry.sha256, entry.name)
        os.replace(got, folder / entry.file)
    finally:
        shutil.rmtree(partial)


def _snapshot(
    repo: str,
    patterns: list[str],
    *,
    progress: bool,
    revision: str | None = None,
    into: Path | None = None,
) -> Path:
    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_UNWANTED if patterns is _WANTED else None,
            local_dir=into,
            tqdm_class=None if progress else _SilentBar,
        )
    except GatedRepoError as error:
        raise DownloadError(
            f"{repo} is gated: accept its licence on the hub and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"the hub has no repository {repo!r} (or it is private: set HF_TOKEN)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise DownloadError(_unreachable(repo, error)) from error
    except Exception as error:  # the HTTP library below has errors of its own
        raise DownloadError(f"downloading {repo} from the hub failed: {error}") from error
    return Path(folder)


def _unreachable(repo: str, error: Exception) -> str:
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set and {repo!r} is not in the hub's cache"
    reason = str(error.__cause__ or error).splitlines()[0]
    return f"the hub cannot be reached for {repo!r} ({reason}), and its cache does not have it"


def _offer(repo: str) -> str:
    """Names the GGUF files of a repository, for a message."""
    try:
        files = huggingface_hub.HfApi().list_repo_files(repo)
    except Exception:  # the message is good without it
        return ""
    names = [f for f in files if f.endswith(".gguf")]
    return f"; name one of its GGUF files as {repo}:FILE: {', '.join(names)}" if names else ""
