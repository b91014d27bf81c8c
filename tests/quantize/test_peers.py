"""What peers make of folders that were written here (see oracles/make_quantised.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from peer_folders import LAYOUTS, write, write_source

PEERS = np.load(Path(__file__).parent / "fixtures" / "peers.npz")
LOOSE = {"gptq": 5e-2, "awq": 5e-2, "nvfp4": 0.25, "mxfp4": 0.25, "int8-dynamic": 0.1}
"""Where the peer computes in 16 bits, or inputs lie between two codes and may fall to either."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_peers(tmp_path, layout):
    write_source(tmp_path / "source")
    ours = write(tmp_path / "source", tmp_path / "out", layout)
    bound = LOOSE.get(layout, LOOSE.get(layout.partition("-")[0], 2e-4))
    np.testing.assert_allclose(ours, PEERS[layout], atol=bound, rtol=0)
