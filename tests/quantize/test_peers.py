"""What peers make of folders that were written here (see oracles/make_quantised.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from peer_folders import LAYOUTS, write

PEERS = np.load(Path(__file__).parent / "fixtures" / "peers.npz")
LOOSE = {"gptq": 2e-2, "awq": 2e-2}
"""gptqmodel computes in fewer bits."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_peers(tmp_path, layout):
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be")
    ours = write(tmp_path / "out", layout, text)
    bound = LOOSE.get(layout.partition("-")[0], 2e-4)
    np.testing.assert_allclose(ours, PEERS[layout], atol=bound, rtol=0)
