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


def logits_of(folder: Path, ids: np.ndarray) -> np.ndarray:
    """[T V] for one sequence, computed in float32 from dequantised weights.

    Args:
        ids: [T].
    """
    model = load_model(folder, dtype="float32", progress=False)
    return np.asarray(nnx.merge(model.graphdef, model.state)(jnp.asarray(ids)).logits)


def answers(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids [T], logits [T V]) that the peer gave."""
    ref = np.load(folder / "ref.npz")
    return [(ref[f"ids{i}"][0], ref[f"logits{i}"][0]) for i in range(4)]
