"""GPTQ checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from quant_oracles import answers, logits_of, oracle


@pytest.mark.parametrize("name", ["gptq-w4-g32", "gptq-w4-asym", "gptq-w8-g32"])
def test_logits_are_those_of_gptqmodel(name):
    folder = oracle(name)
    for ids, logits in answers(folder):
        np.testing.assert_allclose(logits_of(folder, ids), logits, atol=0.08, rtol=0)
