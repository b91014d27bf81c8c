"""Tiny checkpoints that peers quantised, with what the peers answered."""

from __future__ import annotations

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from llmjax.checkpoint import load_model

SHARED = Path(os.environ.get("LLMJAX_SHARED", Path(__file__).parents[3] / "shared"))
FOLDER = SHARED / "oracles/quantized"


def oracle(name: str) -> Path:
    """A checkpoint of `../shared`; skips the test where that is not there."""
    if not FOLDER.exists():
        pytest.skip(f"needs {FOLDER}")
    return FOLDER / name


def logits_of(folder: Path, ids: np.ndarray, dtype: str = "float32") -> np.ndarray:
    """[T V] for one sequence, computed from dequantised weights.

    Args:
        ids: [T].
        dtype: of the weights and of what is computed.
    """
    model = load_model(folder, dtype=dtype, progress=False)
    return np.asarray(nnx.merge(model.graphdef, model.state)(jnp.asarray(ids)).logits)


def answers(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids [T], logits [T V]) that the peer gave."""
    ref = np.load(folder / "ref.npz")
    return [(ref[f"ids{i}"][0], ref[f"logits{i}"][0]) for i in range(4)]


def greedy_until_close(folder: Path) -> list[tuple[list[int], list[int]]]:
    """(prompt, the peer's greedy tokens) up to the first that it could have chosen otherwise.

    The peer's logits and those of native kernels are off by up to 0.1 each; where the best two
    are nearer than that by exact arithmetic, either may come first.
    """
    ref, found = np.load(folder / "ref.npz"), []
    for i in range(4):
        prompt, ids = ref[f"ids{i}"][0], ref[f"greedy{i}"][0]
        best = np.sort(logits_of(folder, ids), axis=-1)[len(prompt) - 1 : -1]
        close = np.flatnonzero(best[:, -1] - best[:, -2] < 0.2)
        end = int(close[0]) if len(close) else len(best)
        found.append((prompt.tolist(), ids[len(prompt) :][:end].tolist()))
    return found
