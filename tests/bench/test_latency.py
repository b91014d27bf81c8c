"""What a decode step costs at least; the runs themselves are in serving/test_commands.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from llmjax.bench.latency import Latency, Times, Work
from llmjax.checkpoint import open_checkpoint
from llmjax.checkpoint.load import load_weights
from llmjax_kernels.kv_format import KV_FORMATS

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"


@pytest.mark.parametrize(
    ("name", "tied", "D", "N", "K", "H", "F", "V"),
    [("smollm2", True, 48, 3, 1, 16, 64, 320), ("llama2", False, 32, 4, 4, 8, 64, 256)],
)
def test_work(name, tied, D, N, K, H, F, V):
    checkpoint = open_checkpoint(FIXTURES / name)
    config, table = checkpoint.read_architecture()
    device = SingleDeviceSharding(jax.devices()[0])
    kind = np.dtype(np.float32)
    state = load_weights(checkpoint, config, table, kind, lambda *_: device, progress=False).state
    model = SimpleNamespace(config=config, state=state, kv_format=KV_FORMATS["float32"])
    matrices = 2 * (D * (N + 2 * K) * H + N * H * D + 3 * D * F)
    # Without a head of its own the whole embedding is read for the logits.
    assert config.tie_embeddings is tied
    assert Work.of(model) == Work(  # type: ignore[arg-type]
        weight_bytes=4 * (matrices + V * D + (2 * 2 + 1) * D),
        kv_bytes=2 * 2 * K * H * 4,
        ops=2 * matrices,
        head_ops=2 * V * D,
    )


def test_the_median_counts():
    times = Times(tokens=4, runs=[0.5, 0.1, 0.2])
    assert (times.seconds, times.tokens_per_second) == (0.2, 20)
    latency = Latency({4: times}, Times(100, [0.5]))
    assert latency.report() == {
        "decode": [
            {"batch_size": 4, "tokens_per_second": 20, "ms": 200, "ms_of_runs": [500, 100, 200]}
        ],
        "prefill": {"input_len": 100, "tokens_per_second": 200, "ms": 500, "ms_of_runs": [500]},
    }
    assert "decode, 4 streams             20.0    200.00    100.00    500.00" in latency.table()
