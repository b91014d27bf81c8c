"""How far a quantised model is from its floats, window by window of text.

llmjax reads what was written, whoever wrote it: products are of dequantised float32 weights, and of
inputs that are rounded where the checkpoint says so.
"""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader
from jaxtyping import Array, Float, Int

from llmjax.checkpoint import Checkpoint, open_checkpoint
from llmjax.checkpoint.quantising import input_format
from llmjax.nn.linear import project
from llmjax.nn.norm import RMSNorm
from llmjax.quantize.forward import embed, like, run_layer, sequences_at_once
from llmjax.quantize.hub import layer_targets
from llmjax.quantize.source import Source

FIGURES = ("nll", "kl", "top1")
"""Means over a window's tokens: negative log likelihood, Kullback-Leibler divergence from the
floats, and how often the likeliest token is the floats'."""


class Judge:
    """Compares models with one.

    Args:
        floats: the folder of the one.
        windows: of token ids, whose first is given and whose others are guessed.
    """

    def __init__(self, floats: Path, windows: Int[np.ndarray, "W T"]):
        self._floats, self._windows = floats, windows
        self._true, self._true_head = final_states(floats, windows)

    def figures(self, path: Path, start: int) -> dict[str, list[float]]:
        """`FIGURES` of each window from `start` on."""
        windows = self._windows[start:]
        states, head = self._true[start:], self._true_head
        if path != self._floats:
            states, head = final_states(path, windows)
        found: dict[str, list[float]] = {name: [] for name in FIGURES}
        for row, true, window in zip(states, self._true[start:], windows, strict=True):
            parts = _compare(row[:-1], head, true[:-1], self._true_head, jnp.asarray(window[1:]))
            for name, value in zip(FIGURES, parts, strict=True):
                found[name].append(round(float(value), 7))
        return found


def choices(path: Path, windows: Int[np.ndarray, "W T"]) -> Int[np.ndarray, "W T"]:
    """The likeliest token behind each."""
    states, head = final_states(path, windows)
    return np.stack([np.asarray(jnp.argmax(project(row, head), axis=-1)) for row in states])


def final_states(
    path: Path, windows: Int[np.ndarray, "W T"]
) -> tuple[Float[np.ndarray, "W T D"], Float[Array, "V D"]]:
    """What the matrix that gives the logits is multiplied by, and that matrix."""
    checkpoint = open_checkpoint(path)
    source = Source(checkpoint)
    config = source.config
    assert config.logits_scale == 1 and config.logits_softcap is None
    outer = source.outer()
    states = embed(outer["embed.weight"], windows, config)
    for index in range(config.num_layers):
        states = _through(checkpoint, source, index, states)
    norm = RMSNorm(config.hidden_size, config.norm_eps)
    norm.weight.set_value(jnp.asarray(outer["norm.weight"]))
    head = outer["embed.weight"] if config.tie_embeddings else outer["head.weight"]
    return np.asarray(norm(jnp.asarray(states))), jnp.asarray(head)


def _through(
    checkpoint: Checkpoint, source: Source, index: int, states: Float[np.ndarray, "W T D"]
) -> Float[np.ndarray, "W T D"]:
    parameters = source.layer(index)
    roundings, static = {}, {}
    shapes = {path: value.shape for path, value in parameters.items()}
    for target in layer_targets(source.config, index, shapes):
        matrix = checkpoint.matrices.get(target.name)
        if matrix is None or matrix.inputs is None:
            continue
        for member in target.members:
            linear = member.removesuffix(".weight")
            roundings[linear] = input_format(matrix.inputs)
            if matrix.inputs.scale is not None:
                static[linear] = jnp.array([matrix.inputs.scale, matrix.inputs.zero], jnp.float32)
    on_device = {path: jnp.asarray(value) for path, value in parameters.items()}
    step = sequences_at_once(*states.shape[:2])
    outputs = []
    for start in range(0, len(states), step):
        out, _ = run_layer(
            on_device,
            static,
            jnp.asarray(states[start : start + step]),
            config=source.config,
            index=like(source.config, index),
            roundings=tuple(sorted(roundings.items())),
        )
        outputs.append(np.asarray(out))
    return np.concatenate(outputs)


@jax.jit
def _compare(
    states: Float[Array, "T D"],
    head: Float[Array, "V D"],
    true: Float[Array, "T D"],
    true_head: Float[Array, "V D"],
    ids: Int[Array, " T"],
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    found = jax.nn.log_softmax(project(states, head))
    wanted = jax.nn.log_softmax(project(true, true_head))
    nll = -jnp.mean(jnp.take_along_axis(found, ids[:, None], axis=1))
    kl = jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - found), axis=1))
    same = jnp.argmax(found, axis=1) == jnp.argmax(wanted, axis=1)
    return nll, kl, jnp.mean(same.astype(jnp.float32))


def sizes(path: Path) -> dict[str, Any]:
    """Bytes of the weights' files, and bits a weight of the layers' matrices, scales and all."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    stored = _gguf_bytes(path) if path.is_file() else {}
    for file in files if path.is_dir() else ():
        stored |= _safetensors_bytes(file)
    in_layers = sum(n for name, n in stored.items() if name.startswith(("blk.", "model.layers.")))
    shapes = Source(open_checkpoint(path)).shapes
    weights = sum(prod(s) for p, s in shapes.items() if p.startswith("layers.") and len(s) == 2)
    return {
        "bytes": sum(file.stat().st_size for file in files),
        "bits": round(8 * in_layers / weights, 3),
    }


def _gguf_bytes(file: Path) -> dict[str, int]:
    return {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(file).tensors}


def _safetensors_bytes(file: Path) -> dict[str, int]:
    with file.open("rb") as opened:
        header = json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
    header.pop("__metadata__", None)
    ends = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: end - start for name, (start, end) in ends.items()}
