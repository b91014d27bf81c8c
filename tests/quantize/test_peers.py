"""What peers make of folders that were written here (see oracles/make_quantised.py)."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import IDS, LAYOUTS, logits, write, write_source

from llmjax.checkpoint import open_checkpoint
from llmjax.quantize.forward import embed, like, run_layer
from llmjax.quantize.source import Source

PEERS = np.load(Path(__file__).parent / "fixtures" / "peers.npz")
LOOSE = {"gptq": 5e-2, "awq": 5e-2, "nvfp4": 0.25, "mxfp4": 0.25, "int8-dynamic": 0.2}
"""Where the peer computes in 16 bits, or inputs lie between two codes and may fall to either."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_peers(tmp_path, layout):
    write_source(tmp_path / "source")
    ours = write(tmp_path / "source", tmp_path / "out", layout)
    bound = LOOSE.get(layout, LOOSE.get(layout.partition("-")[0], 2e-4))
    np.testing.assert_allclose(ours, PEERS[layout], atol=bound, rtol=0)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.endswith("dynamic")])
def test_what_is_written_is_read_back(tmp_path, layout):
    write_source(tmp_path / "source")
    ours = write(tmp_path / "source", tmp_path / "out", layout)
    source = Source(open_checkpoint(tmp_path / "out"))
    config, hidden = source.config, embed(source.outer()["embed.weight"], IDS, source.config)
    for index in range(config.num_layers):
        weights = {path: jnp.asarray(value) for path, value in source.layer(index).items()}
        about = {"config": config, "index": like(config, index), "roundings": ()}
        hidden, _ = run_layer(weights, {}, jnp.asarray(hidden), **about)
    np.testing.assert_allclose(logits(source, hidden[0]), ours, atol=2e-4, rtol=0)
