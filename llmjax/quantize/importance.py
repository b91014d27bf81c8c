"""How much an error counts at each input of each matrix: llama.cpp's importance matrix.

It is the mean square of what a matrix is given, by the tensor's name in a GGUF file. Files of
`llama-imatrix` are read in both of its formats.
Source: tools/imatrix and common/imatrix-loader.cpp of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tqdm.auto import tqdm

from ..checkpoint.gguf_file import GGUFCheckpoint
from ..errors import CheckpointFormatError, ConfigError, LlmjaxError
from .calibration import calibration_windows
from .forward import embed, like, run_layer, sequences_at_once
from .job import Job
from .layer import places_of
from .source import Source
from .work import fingerprint

log = logging.getLogger(__name__)

Importance = dict[str, Float[np.ndarray, " K"]]
"""By the tensor's name in a GGUF file."""

_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_importance(path: Path) -> Importance:
    """That of a file of llama-imatrix.

    Raises:
        ConfigError: it is not there, or is no such file; says what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        found = _read_gguf(path) if is_gguf else _read_legacy(path.read_bytes())
    except (OSError, ValueError, struct.error, LlmjaxError) as error:
        raise ConfigError(
            f"imatrix is {str(path)!r}, which is no importance matrix: {error}"
        ) from error
    if not found:
        raise ConfigError(f"imatrix is {str(path)!r}, which has no entries")
    bad = [
        name for name, values in found.items() if not (np.isfinite(values) & (values >= 0)).all()
    ]
    if bad:
        raise ConfigError(
            f"imatrix is {str(path)!r}, which has values that are negative or not finite for "
            f"{', '.join(bad[:5])}"
        )
    return found


def _read_gguf(path: Path) -> Importance:
    """Sums of squares, and of how many tokens."""
    file = GGUFCheckpoint(path)
    found: Importance = {}
    for name in file.tensors:
        if not name.endswith(_SUMS):
            continue
        tensor = name.removesuffix(_SUMS)
        if f"{tensor}{_COUNTS}" not in file.tensors:
            raise CheckpointFormatError(f"it has sums of {tensor}, but no counts")
        sums = file.read(name).astype(np.float32)
        counts = file.read(f"{tensor}{_COUNTS}").astype(np.float32).reshape(-1, 1)
        if sums.size % max(1, counts.size):
            raise CheckpointFormatError(
                f"it has {counts.size} counts for {sums.size} sums of {tensor}"
            )
        rows = sums.reshape(len(counts), -1)
        # What was never used counts alike everywhere.
        means = np.where(counts > 0, rows / np.maximum(counts, 1), np.float32(1))
        found[tensor] = means.ravel()
    return found


def _read_legacy(data: bytes) -> Importance:
    """Entries of a name, a number of calls, and sums that are to be divided by it."""
    position = 0

    def take(code: str) -> tuple:
        nonlocal position
        values = struct.unpack_from(f"<{code}", data, position)
        position += struct.calcsize(f"<{code}")
        return values

    found: Importance = {}
    (count,) = take("i")
    for _ in range(count):
        (length,) = take("i")
        if not 0 < length < 1024:
            raise ValueError(f"a name of {length} bytes at byte {position}")
        name = take(f"{length}s")[0].decode()
        calls, size = take("ii")
        if size < 1:
            raise ValueError(f"{size} values of {name}")
        sums = np.frombuffer(data, "<f4", size, position)
        position += sums.nbytes
        found[name] = sums / np.float32(calls) if calls > 0 else sums.copy()
    return found


def measured_importance(
    job: Job, source: Source, name_of: Callable[[str], str | None]
) -> Importance:
    """That of calibration text, which flows through the model as it is.

    As in a file of llama-imatrix, the matrix that gives the logits has none. A run that was
    interrupted is gone on with after its last layer; what it has `Kept` is there until removed.

    Args:
        name_of: a parameter's path -> the tensor's name in the file; None where it has none.
    """
    kept = Kept(job)
    found, hidden, done = kept.read()
    if hidden is None:
        windows = calibration_windows(job.config, job.source.read_text_side().tokenizer)
        hidden = embed(source.read(["embed.weight"])["embed.weight"], windows, source.config)
    places = places_of(source.config)
    watched = tuple(place.linears[0] for place in places)
    layers = range(done, source.config.num_layers)
    bar = {"desc": "measuring importance", "unit": "layer", "disable": not job.progress}
    for index in tqdm(layers, initial=done, total=source.config.num_layers, **bar):
        hidden, means = _mean_squares(source, index, hidden, watched)
        for place in places:
            for linear in place.linears:
                name = name_of(f"layers.{index}.{linear}.weight")
                if name is not None:
                    found[name] = means[place.linears[0]]
        kept.write(found, hidden, index + 1)
    return found


class Kept:
    """What a run has measured so far, in a file beside its destination, for another to go on with.

    Raises:
        ConfigError: it cannot be written, or is of another run.
    """

    def __init__(self, job: Job):
        self.path = job.dst.with_name(f"{job.dst.name}.importance.npz")
        self._run = json.dumps(fingerprint(job))

    def read(self) -> tuple[Importance, Float[np.ndarray, "S T D"] | None, int]:
        """Of the layers that are done, what flows into the next one, and how many those are."""
        if not self.path.exists():
            return {}, None, 0
        with np.load(self.path) as file:
            kept = dict(file)
        if str(kept.pop("run")) != self._run:
            raise ConfigError(
                f"{self.path} is of a run with other settings or another model; remove it, or ask "
                "for the same again"
            )
        hidden, done = kept.pop("hidden"), int(kept.pop("done"))
        log.info("%s: going on after layer %d", self.path, done)
        return kept, hidden, done

    def write(self, found: Importance, hidden: Float[np.ndarray, "S T D"], done: int) -> None:
        scratch = self.path.with_suffix(".part")
        arrays: dict[str, Any] = {**found, "run": self._run, "hidden": hidden, "done": done}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                np.savez(file, **arrays)
            os.replace(scratch, self.path)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error}") from error

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _mean_squares(
    source: Source, index: int, hidden: Float[np.ndarray, "S T D"], watched: tuple[str, ...]
) -> tuple[Float[np.ndarray, "S T D"], Mapping[str, Float[np.ndarray, " K"]]]:
    """What flows out of a layer, and the mean squares of what its linear layers are given."""
    parameters = {path: jnp.asarray(value) for path, value in source.layer(index).items()}
    step = sequences_at_once(*hidden.shape[:2])
    run = partial(
        run_layer, config=source.config, index=like(source.config, index), watched=watched
    )
    outputs: list[np.ndarray] = []
    sums: dict[str, Any] = dict.fromkeys(watched, 0.0)
    for start in range(0, len(hidden), step):
        out, seen = run(parameters, {}, hidden[start : start + step])
        outputs.append(np.asarray(out))
        sums = {name: sums[name] + np.asarray(_squares(seen[name]), np.float64) for name in watched}
    tokens = hidden.shape[0] * hidden.shape[1]
    return np.concatenate(outputs), {n: (s / tokens).astype(np.float32) for n, s in sums.items()}


@jax.jit
def _squares(x: Float[Array, "B T K"]) -> Float[Array, " K"]:
    return jnp.sum(x * x, axis=(0, 1))
