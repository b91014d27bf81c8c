"""Run by a test on virtual devices: what quantised models are over 1, 2, ... of them, as JSON.

run_quantised.py MODELS SIZES, where MODELS are pairs of a folder and a quantization, or null

Codes are kept, and made, as where Triton serves.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from llmjax.checkpoint import load, load_model
from llmjax.checkpoint.gguf_file import GGUFCheckpoint
from llmjax.checkpoint.text import TextSide
from llmjax.config import ParallelConfig
from llmjax.parallel.mesh import make_places
from llmjax_kernels.quant_matmul import QuantWeight

load.triton_available = lambda: True  # type: ignore[attr-defined]
# Nothing here is text, and a fixture's vocabulary is that of no tokenizer.
GGUFCheckpoint.read_text_side = lambda self: TextSide(None, {})  # type: ignore
models, sizes = map(json.loads, sys.argv[1:])
IDS = jnp.asarray(np.random.default_rng(0).integers(3, 250, 24), jnp.int32)


class Lines(logging.Handler):
    """What the log says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def compiled(model: Any) -> Any:
    logits = jax.jit(lambda state: nnx.merge(model.graphdef, state)(IDS).logits)
    return logits.lower(model.state).compile()


def run(folder: str, quantization: str | None, size: int) -> dict[str, Any]:
    config = ParallelConfig(tensor_parallel_size=size, data_parallel_size=1 + (size == 2))
    (place,), *others = make_places(config)
    logging.getLogger("llmjax").addHandler(said := Lines())
    model = load_model(folder, quantization=quantization, mesh=place.mesh, progress=False)
    logging.getLogger("llmjax").removeHandler(said)
    program = compiled(model)
    text, logits = program.as_text(), np.asarray(program(model.state))
    moved = {}
    if size == 2:
        elsewhere = model.on(others[0][0])
        moved = {
            "elsewhere": np.asarray(compiled(elsewhere)(elsewhere.state), np.float32).tolist(),
            "devices": sorted(
                {d.id for x in jax.tree.leaves(elsewhere.state) for d in x.devices()}
            ),
        }
    weights = {
        ".".join(map(str, keys)): leaf.get_value()
        for keys, leaf in nnx.to_flat_state(model.state)
        if isinstance(leaf.get_value(), QuantWeight)
    }
    return moved | {
        "logits": logits.astype(np.float32).tolist(),
        "codes": {path: w.codes.nbytes for path, w in weights.items()},
        "codes_of_one": {
            path: w.codes.addressable_shards[0].data.nbytes for path, w in weights.items()
        },
        "groups": {path: w.format.group for path, w in weights.items()},
        "said": said.lines,
        "all_reduces": text.count(" all-reduce("),
        "all_gathers": text.count(" all-gather("),
    }


print(json.dumps([[run(*model, size) for size in sizes] for model in models]))
