"""Folders of a tiny model for peers to read, one of each layout; and what they should answer.

`python tests/quantize/peer_folders.py OUT` writes them, and `tests/oracles/make_quantised.py OUT`,
in an environment with the peers, notes what transformers makes of them.

Codes are the nearest ones in every layout, so that they are the same wherever they are made.
Asymmetric pack-quantized is not among them: transformers 5.24 with compressed-tensors 0.20 does not
load what llmcompressor writes of it either.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from llmjax.checkpoint import open_checkpoint
from llmjax.nn.linear import project
from llmjax.nn.norm import RMSNorm
from llmjax.quantize import layerwise, quantize
from llmjax.quantize.config import QuantizeConfig
from llmjax.quantize.formats import int_format
from llmjax.quantize.forward import embed
from llmjax.quantize.layer import Layer
from llmjax.quantize.nearest import nearest
from llmjax.quantize.source import Source

SOURCE = Path(__file__).parents[1] / "models" / "fixtures" / "qwen25"
IDS = np.arange(7, 19)[None] * 5 % 256
GROUPED = {"group_size": 16}
LAYOUTS: dict[str, tuple[str, dict]] = {
    "gptq-2": ("gptq", GROUPED | {"bits": 2}),
    "gptq-4": ("gptq", GROUPED),
    "gptq-4-asymmetric": ("gptq", GROUPED | {"symmetric": False}),
    "gptq-8-rows": ("gptq", {"group_size": -1, "bits": 8}),
    "awq": ("awq", GROUPED),
    "int4": ("int4", GROUPED),
    "int8-rows": ("int8", {}),
    "int8-dynamic": ("int8", {"activations": "dynamic"}),
    "fp8-dynamic": ("fp8", {}),
    "fp8-weights": ("fp8", {"activations": "none"}),
    "fp8-block": ("fp8", {"granularity": "block", "activations": "none"}),
    "nvfp4": ("nvfp4", {}),
    "mxfp4": ("mxfp4", {}),
}


def round_to_nearest(layer: Layer, config: QuantizeConfig) -> None:
    format = int_format(config, layer.dtype)
    for place in layer.places:
        for target in layer.targets_at(place):
            weight = layer.weight(target)
            codes = nearest(weight, format.grid, format.group_of(target, weight.shape))
            layer.put(target, format.coded(codes))


@contextmanager
def noted_layers() -> Iterator[list[Layer]]:
    """The layers of what is quantised meanwhile, with GPTQ and AWQ rounding to nearest."""
    layers, methods = [], dict(layerwise.QUANTISE)

    def note(quantise):
        def run(layer: Layer, config: QuantizeConfig) -> None:
            quantise(layer, config)
            layers.append(layer)

        return run

    try:
        for name, quantise in methods.items():
            plain = round_to_nearest if name in ("gptq", "awq") else quantise
            layerwise.QUANTISE[name] = note(plain)
        yield layers
    finally:
        layerwise.QUANTISE.update(methods)


def write_source(folder: Path) -> None:
    """The model, a tokenizer that knows no word, and words."""
    shutil.copytree(SOURCE, folder)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "words.txt").write_text("to be or not to be that is the question")


def write(model: Path, folder: Path, name: str) -> np.ndarray:
    """Writes a layout of `write_source`'s; gives the logits [T V] of `IDS` that it stands for."""
    method, settings = LAYOUTS[name]
    if method in ("gptq", "awq"):
        words = {"calibration": str(model / "words.txt"), "num_samples": 1, "sequence_length": 8}
        settings = settings | words
    with noted_layers() as layers:
        quantize(model, folder, method, progress=False, dtype="float32", **settings)
    source = Source(open_checkpoint(SOURCE))
    hidden = embed(source.outer()["embed.weight"], IDS, source.config)
    for layer in layers:
        layer.hidden = hidden
        hidden = layer.outputs()
    return logits(source, hidden[0])


def logits(source: Source, states: np.ndarray) -> np.ndarray:
    """[T V] of what the last layer gives [T D]."""
    outer = source.outer()
    norm = RMSNorm(source.config.hidden_size, source.config.norm_eps)
    norm.weight.set_value(jnp.asarray(outer["norm.weight"]))
    head = outer.get("head.weight", outer["embed.weight"])
    return np.asarray(project(norm(jnp.asarray(states)), jnp.asarray(head)))


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir()
    write_source(out / "source")
    for layout in LAYOUTS:
        np.save(out / f"{layout}.npy", write(out / "source", out / layout, layout))
