"""Tiny checkpoints that peers quantised, with what the peers answered."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from llmjax import LLM, SamplingParams
from llmjax.checkpoint import load_model
from llmjax.quant import Tensor

SHARED = Path(os.environ.get("LLMJAX_SHARED", Path(__file__).parents[3] / "shared"))
FOLDER = SHARED / "oracles/quantized"
OURS = Path(__file__).parents[1] / "oracles/data/quantized"
DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
}

Tensors = dict[str, np.ndarray]
Config = dict[str, Any]
Edit = Callable[[Tensors, Config], object]
"""Of tensors and quantization_config."""

LAYER = "model.layers.0.mlp.up_proj"
"""That tests damage."""


def oracle(name: str) -> Path:
    """A checkpoint of `../shared`; skips the test where that is not there."""
    if not FOLDER.exists():
        pytest.skip(f"needs {FOLDER}")
    return FOLDER / name


def our_oracle(name: str, tmp_path: Path) -> Path:
    """A checkpoint that make_quantized.py made, with the tokenizer that all of them share."""
    folder = tmp_path / name
    shutil.copytree(OURS / name, folder)
    for file in OURS.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def edited(folder: Path, tmp_path: Path, change: Edit) -> Path:
    """A copy of a checkpoint whose tensors, and quantization_config, `change` has changed."""
    copy = tmp_path / f"{folder.name}-edited"
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    copy.chmod(0o755)
    config = json.loads((copy / "config.json").read_text())
    tensors = read_tensors(copy)
    change(tensors, config["quantization_config"])
    (copy / "config.json").write_text(json.dumps(config))
    write_tensors(copy, tensors)
    return copy


def drop(part: str) -> Edit:
    return lambda tensors, settings: tensors.pop(f"{LAYER}.{part}")


def put(part: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    def edit(tensors: Tensors, settings: Config) -> None:
        tensors[f"{LAYER}.{part}"] = change(tensors[f"{LAYER}.{part}"])

    return edit


def read_tensors(folder: Path) -> Tensors:
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, stop = (8 + length + n for n in entry["data_offsets"])
        values = np.frombuffer(data[start:stop], DTYPES[entry["dtype"]])
        found[name] = values.reshape(entry["shape"]).copy()
    return found


def write_tensors(folder: Path, tensors: Tensors) -> None:
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header, blobs, offset = {}, [], 0
    for name, values in tensors.items():
        blob = np.ascontiguousarray(values).tobytes()
        ends = [offset, offset + len(blob)]
        header[name] = {
            "dtype": names[values.dtype],
            "shape": list(values.shape),
            "data_offsets": ends,
        }
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + b"".join(blobs)
    (folder / "model.safetensors").write_bytes(data)


def in_memory(tensors: Tensors) -> dict[str, Tensor]:
    """As formats read them."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}

    def stored(values: np.ndarray) -> Tensor:
        return Tensor(
            values.shape,
            names[values.dtype],
            lambda start, stop: values.reshape(-1, *values.shape[1:])[start:stop],
            lambda start, stop, first, last: values[start:stop, first:last],
        )

    return {name: stored(values) for name, values in tensors.items()}


def opened(folder: Path, dtype: str = "float32") -> Callable[[np.ndarray], np.ndarray]:
    """ids [T] -> logits [T V], computed by XLA."""
    model = load_model(folder, dtype=dtype, progress=False)
    merged = nnx.merge(model.graphdef, model.state)
    return lambda ids: np.asarray(merged(jnp.asarray(ids)).logits)


def logits_of(folder: Path, ids: np.ndarray, dtype: str = "float32") -> np.ndarray:
    """[T V] for one sequence, computed from dequantised weights.

    Args:
        ids: [T].
        dtype: of the weights and of what is computed.
    """
    return opened(folder, dtype)(ids)


class Answer(NamedTuple):
    """What a peer answered to one prompt."""

    ids: np.ndarray
    logits: np.ndarray
    greedy: np.ndarray


def peer_answers(folder: Path) -> Iterator[Answer]:
    """Of a folder of `oracle` or `our_oracle`."""
    ref = np.load(folder / "ref.npz")
    for i in range(sum(name.startswith("ids") for name in ref)):
        ids, greedy = ref[f"ids{i}"].reshape(-1), ref[f"greedy{i}"].reshape(-1)
        with_prompt = len(greedy) > len(ids) and (greedy[: len(ids)] == ids).all()
        logits = ref[f"logits{i}"].reshape(len(ids), -1)
        yield Answer(ids, logits, greedy[len(ids) :] if with_prompt else greedy)


def answers(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids [T], logits [T V]) that the peer gave."""
    return [(answer.ids, answer.logits) for answer in peer_answers(folder)]


def check_answers(folder: Path, atol: float, *, flips: float = 0.0) -> None:
    """Our logits are a peer's, and its greedy tokens are ours.

    Where values fall between two codes to within a rounding of a float, the two may take
    different ones: with `flips`, fewer than half of the rows may differ by as much, as what
    comes behind such a token sees it.
    """
    logits_of = opened(folder)
    worst = max(atol, flips)
    rows = []
    for ids, logits, greedy in peer_answers(folder):
        found = logits_of(np.concatenate([ids, greedy[:-1]]))
        rows += list(np.abs(found[: len(ids)] - logits).max(-1))
        after = found[len(ids) - 1 :]
        lead = after.max(-1) - after[np.arange(len(greedy)), greedy]
        assert (lead <= 2 * worst).all(), "another token is better by more than what may differ"
    assert max(rows) <= worst
    assert np.median(rows) <= atol


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


def check_choices(llm: LLM, folder: Path) -> None:
    """Greedy tokens are the peer's, but where two are as near as its rounding and ours may swap."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prefixes, expected = zip(*clear_choices(folder), strict=True)
    outputs = llm.generate(list(prefixes), params)
    assert [output.outputs[0].token_ids[0] for output in outputs] == list(expected)
    assert len(expected) >= 12  # of 48
