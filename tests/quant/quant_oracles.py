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


def assert_as_far_as_bfloat16(folder: Path) -> None:
    """What a peer computed in bfloat16 is as far from exact arithmetic as bfloat16 is here.

    Roundings differ by the order of sums and by what is rounded between; a wrong code or scale is
    ten times as much. The peer's logits are rounded too.
    """
    peer, here = [], []
    for ids, logits in answers(folder):
        np.testing.assert_array_equal(logits, logits.astype(jnp.bfloat16).astype(np.float32))
        exact = logits_of(folder, ids)
        peer.append(logits - exact)
        here.append(logits_of(folder, ids, "bfloat16") - exact)

    def rms(errors: list[np.ndarray]) -> float:
        return float(np.sqrt(np.mean(np.concatenate(errors) ** 2)))

    assert rms(peer) < 1.2 * rms(here)
    assert max(np.abs(error).max() for error in peer) < 0.08


def clear_choices(folder: Path) -> list[tuple[list[int], int]]:
    """(tokens so far, the peer's next) wherever it could hardly have chosen another.

    By exact arithmetic the best two logits are 0.15 apart, ten times the peer's rms error.
    """
    ref, found = np.load(folder / "ref.npz"), []
    for i in range(4):
        start, ids = ref[f"ids{i}"].shape[1], ref[f"greedy{i}"][0]
        best = np.sort(logits_of(folder, ids), axis=-1)
        margins = best[:, -1] - best[:, -2]
        clear = [at for at in range(start, len(ids)) if margins[at - 1] > 0.15]
        found += [(ids[:at].tolist(), int(ids[at])) for at in clear]
    return found
