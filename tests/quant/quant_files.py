"""Tiny quantised folders of random codes, packed bit by bit as the formats say."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from tiny_files import TINY_TOKENIZER, hf_tensors, write_folder

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
"""The tiny files' tensors as heads that the native kernels take."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs is where in a word."""


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes as int32 words, the lowest bits first."""
    rows = []
    for row in codes.tolist():
        number = sum(code << bits * i for i, code in enumerate(row))
        rows.append(number.to_bytes(len(row) * bits // 8, "little"))
    return np.frombuffer(b"".join(rows), "<i4").reshape(len(codes), -1)


@dataclass
class Layer:
    """The codes [N, K], zero points and scales [N, groups] of a layer, and its inputs' groups."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    g_idx: np.ndarray
    bits: int

    @property
    def values(self) -> np.ndarray:
        """[N, K] in float32."""
        zeros, scales = (x.astype(np.float32)[:, self.g_idx] for x in (self.zeros, self.scales))
        return (self.codes.astype(np.float32) - zeros) * scales


def random_layer(
    rng: np.random.Generator,
    N: int,
    K: int,
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    act_order: bool = False,
) -> Layer:
    groups = K // group
    codes = rng.integers(0, 2**bits, (N, K), np.uint8)
    zeros = np.full((N, groups), 2 ** (bits - 1), np.uint8)
    if not symmetric:
        zeros = rng.integers(0, 2**bits, (N, groups), np.uint8)
    scales = (rng.uniform(0.5, 1, (N, groups)) / 2**bits / np.sqrt(K)).astype(np.float16)
    g_idx = (rng.permutation(K) if act_order else np.arange(K)) // group
    return Layer(codes, zeros, scales, g_idx.astype(np.int32), bits)


def gptq_tensors(layer: Layer, *, less: int = 1) -> dict[str, np.ndarray]:
    """As GPTQ has them; v1 stores zero points less one."""
    zeros = (layer.zeros.astype(int) - less) % 2**layer.bits
    return {
        "qweight": pack(layer.codes, layer.bits).T,
        "qzeros": pack(zeros.T, layer.bits),
        "scales": layer.scales.T,
        "g_idx": layer.g_idx,
    }


def gptq_v2_tensors(layer: Layer) -> dict[str, np.ndarray]:
    return gptq_tensors(layer, less=0)


def awq_gemm_tensors(layer: Layer) -> dict[str, np.ndarray]:
    def words(outputs: np.ndarray) -> np.ndarray:
        eights = outputs.reshape(len(outputs), -1, 8)[:, :, AWQ_ORDER]
        return pack(eights.reshape(outputs.shape), 4)

    return {
        "qweight": words(layer.codes.T),
        "qzeros": words(layer.zeros.T),
        "scales": layer.scales.T,
    }


def awq_gemv_tensors(layer: Layer) -> dict[str, np.ndarray]:
    """There is room for more groups than there are."""
    groups = layer.zeros.shape[1]
    room = ((0, 0), (0, 32 - groups))
    return {
        "qweight": pack(layer.codes, 4),
        "qzeros": pack(np.pad(layer.zeros, room), 4),
        "scales": np.pad(layer.scales, room),
    }


@dataclass
class Folder:
    """A tiny Llama whose projections are quantised.

    Attributes:
        layers: what is in it, by the name of the layer.
        tensors: all that is written; tests may damage it before `write`.
    """

    path: Path
    settings: dict[str, Any]
    layers: dict[str, Layer] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self, **config: Any) -> Path:
        stored = {name: np.ascontiguousarray(value) for name, value in self.tensors.items()}
        settings = {"quantization_config": self.settings} if self.settings else {}
        return write_folder(self.path, stored, **{**HEADS, **settings, **config})


def make_folder(
    path: Path,
    tiny_model: Path,
    settings: dict[str, Any],
    pack_as,
    tensors: dict[str, np.ndarray] | None = None,
    **how,
) -> Folder:
    """Args:
    pack_as: one of the functions above.
    tensors: of a model of other sizes.
    how: what `random_layer` takes.
    """
    path.mkdir(exist_ok=True)
    for name in TINY_TOKENIZER:
        shutil.copy(tiny_model / name, path / name)
    rng, folder = np.random.default_rng(0), Folder(path, settings)
    for name, value in (hf_tensors() if tensors is None else tensors).items():
        if "proj" not in name:
            folder.tensors[name] = np.ones_like(value) if value.ndim == 1 else value / 8
            continue
        layer = name.removesuffix(".weight")
        how_this = how | {"group": value.shape[1]} if how.get("group") == -1 else how
        folder.layers[layer] = random_layer(rng, *value.shape, **how_this)
        quantise(folder, layer, pack_as)
    return folder


def quantise(folder: Folder, layer: str, pack_as) -> None:
    """Puts the tensors of a layer that is in `layers` in place of its weight."""
    folder.tensors.pop(f"{layer}.weight", None)
    parts = pack_as(folder.layers[layer])
    folder.tensors |= {f"{layer}.{part}": value for part, value in parts.items()}
