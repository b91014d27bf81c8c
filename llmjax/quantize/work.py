"""What a run has done so far, in a folder beside its destination, so that another goes on there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Float

from ..checkpoint.json_file import read_json
from ..checkpoint.safetensors_write import write_index, write_safetensors
from ..errors import ConfigError
from .job import Job

_PROGRESS, _LOCK = "progress.json", ".lock"
_VERSION = 1


class Work:
    """The folder of a run; a context that holds its lock.

    Attributes:
        folder: what it holds becomes the destination.
        done: shards that are written.
        ignored: linear layers in them that stay in floats.

    Raises:
        ConfigError: it cannot be written, another process works in it, or it is of another run.
    """

    def __init__(self, job: Job, shards: int):
        self.folder = job.dst.with_name(f"{job.dst.name}.partial")
        self._dst, self._shards, self._run = job.dst, shards, fingerprint(job)
        self._files: dict[str, dict[str, int]] = {}
        self.ignored: list[str] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write {job.dst}: {error}") from error
        self._lock = FileLock(self.folder / _LOCK)

    def __enter__(self) -> Work:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(f"{self.folder}: another process works there") from None
        try:
            if self._path(_PROGRESS).exists():
                self._resume()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if not self.done and self.folder.exists():
            shutil.rmtree(self.folder)

    @property
    def done(self) -> int:
        return len(self._files)

    def hidden(self) -> Float[np.ndarray, "S T D"]:
        """What flowed out of the last layer that is done."""
        return np.load(self._hidden(self.done))

    def add(
        self,
        tensors: Mapping[str, np.ndarray],
        hidden: Float[np.ndarray, "S T D"] | None,
        ignored: list[str],
    ) -> None:
        """Writes the next shard, and what flows on; from then on it is done.

        Args:
            ignored: linear layers so far that stay in floats.
        """
        number = self.done + 1
        name = f"model-{number:05}-of-{self._shards:05}.safetensors"
        write_safetensors(self._path(name), tensors)
        if hidden is not None:
            np.save(self._hidden(number), hidden)
        self._files[name] = {key: value.nbytes for key, value in tensors.items()}
        self.ignored = ignored
        state = {"run": self._run, "files": self._files, "ignored": ignored}
        scratch = self._path(f"{_PROGRESS}.part")
        scratch.write_text(json.dumps(state), encoding="utf-8")
        os.replace(scratch, self._path(_PROGRESS))
        self._hidden(number - 1).unlink(missing_ok=True)

    def finish(self) -> None:
        """Gives the folder its name."""
        write_index(self.folder, self._files)
        for path in (self._path(_PROGRESS), self._path(_LOCK), *self.folder.glob("hidden-*.npy")):
            path.unlink(missing_ok=True)
        os.rename(self.folder, self._dst)

    def _resume(self) -> None:
        state = read_json(self._path(_PROGRESS))
        if state.get("run") != self._run:
            raise ConfigError(
                f"{self.folder} is of a run with other settings or another model; remove it, or "
                "ask for the same again"
            )
        self._files, self.ignored = state["files"], state["ignored"]

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _hidden(self, number: int) -> Path:
        return self._path(f"hidden-{number}.npy")


def fingerprint(job: Job) -> dict[str, Any]:
    """What must be the same for one run to go on with what another did, as JSON has it."""
    config, path = job.config, job.source.path
    run: dict[str, Any] = {"version": _VERSION, "source": str(path.resolve())}
    run["files"] = sorted(_stamp(file) for file in ([path] if path.is_file() else path.iterdir()))
    run["config"] = asdict(config)
    if config.calibration is not None:
        text = Path(config.calibration).expanduser()
        run["calibration"] = hashlib.sha256(text.read_bytes()).hexdigest() if text.exists() else ""
    return json.loads(json.dumps(run))


def _stamp(file: Path) -> list[Any]:
    status = file.stat()
    return [file.name, status.st_size, status.st_mtime_ns]
