"""The device model against values worked out by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.cache.layout import KVLayout
from llmjax.cache.page_store import Copy, Load, Save
from llmjax.config import CacheConfig, SchedulerConfig
from llmjax.errors import (
    CheckpointFormatError,
    ConfigError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from llmjax.simulate.device import DEVICES, WEIGHTS, Figures, Machine, Work
from llmjax.simulate.shapes import SHAPES, ModelShape, find_shape, read_shape

# 2 layers of 4 wide with 2 heads of 2, one of them for keys; mlp 8; 10 tokens.
TINY = ModelShape(10, 4, 2, 2, 1, 2, 8, 64)
TOY = Figures(memory=1e6, bandwidth=100.0, peak=1e4, link=50.0, host_link=10.0, source="test")


def toy(**options) -> Machine:
    exact = {"memory_efficiency": 1.0, "compute_efficiency": 1.0, "overhead": 0.5}
    return Machine(TINY, TOY, **{**exact, **options})


def test_parameters_are_those_of_the_matrices():
    # A layer: q 4x4, k and v 4x2 each, o 4x4, three of 4x8.
    assert TINY.matrix_params == 2 * (16 + 8 + 8 + 16 + 96)
    assert TINY.num_params == 288 + 2 * 40
    assert round(SHAPES["llama-3-8b"].num_params / 1e9, 2) == 8.03
    assert round(SHAPES["llama-3-70b"].num_params / 1e9, 1) == 70.6
    assert round(SHAPES["qwen2.5-7b"].num_params / 1e9, 1) == 7.6
    assert round(SHAPES["smollm2-135m"].num_params / 1e6, 1) == 134.5
    assert round(SHAPES["llama-2-13b"].num_params / 1e9, 1) == 13.0


def test_a_decode_step_takes_as_long_as_its_bytes():
    # Contexts of 3 and 5 tokens: 8 tokens in 2 layers, each 2 (K, V) x 1 head x 2 x 2 bytes.
    work = Work.of([(2, 1), (4, 1)], {None: 2}, rows=2, sampled=2)
    assert (work.seen, work.pairs) == (16, 16)
    read = (288 + 40) * 2 + 16 * 8
    assert toy().seconds(work) == pytest.approx(read / 100 + 0.5)


def test_a_prompt_takes_as_long_as_its_operations():
    work = Work.of([(0, 60)], {None: 2}, rows=64, sampled=1)
    assert (work.seen, work.pairs) == (2 * 60, 2 * 60 * 61 // 2)
    operations = 2 * (288 * 64 + 40) + 4 * 2 * 2 * work.pairs
    slow = Figures(1e6, 1e6, 100.0, 50.0, 10.0, "test")
    machine = Machine(TINY, slow, overhead=0, memory_efficiency=1, compute_efficiency=1)
    assert machine.seconds(work) == pytest.approx(operations / 100)


def test_efficiencies_are_shares_of_the_figures():
    work = Work.of([(2, 1)], {None: 2}, rows=1, sampled=1)
    whole = toy(overhead=0.0).seconds(work)
    assert toy(overhead=0.0, memory_efficiency=0.5).seconds(work) == pytest.approx(2 * whole)


@given(
    st.integers(0, 40),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 50)),
)
@settings(max_examples=200, deadline=None)
def test_attention_is_counted_position_by_position(start, count, window):
    work = Work.of([(start, count)], {window: 1}, rows=count, sampled=1)
    sees = [min(p + 1, window or p + 1) for p in range(start, start + count)]
    read = {t for p, n in zip(range(start, start + count), sees, strict=True)
            for t in range(p + 1 - n, p + 1)}  # fmt: skip
    assert work.pairs == sum(sees)
    assert work.seen == len(read)


def test_tensor_parallelism_shares_work_and_pays_for_reductions():
    work = Work.of([(2, 1)], {None: 2}, rows=1, sampled=1)
    machine = toy(tensor_parallel=2)
    # Its one key head is on both devices.
    assert machine.kv_bytes == 2 * toy().kv_bytes
    read = (288 + 40) * 2 + work.seen * machine.kv_bytes
    reduce = 2 * 2 * (10e-6 + 2 * (1 / 2) * 4 * 2 / 50)
    assert machine.seconds(work) == pytest.approx(read / 200 + reduce + 0.5)


def test_bytes_of_weights_and_pages_follow_their_types():
    layout = KVLayout(16, (None,), 2, ((0, 0), (0, 1)))
    assert toy().weight_bytes == 368 * 2
    assert toy(weights=WEIGHTS["int4"]).weight_bytes == 184
    assert toy().page_bytes(layout) == 2 * 16 * 2 * 1 * 2 * 2
    # Two codes of a byte and a scale of four.
    assert toy(kv_dtype="int8").page_bytes(layout) == 2 * 16 * 2 * 1 * 6
    assert toy(kv_dtype="fp8_e4m3").page_bytes(layout) == toy(kv_dtype="int8").page_bytes(layout)


def test_moves_go_over_memory_or_over_the_host_link():
    machine = toy()
    assert machine.move_seconds([Copy(0, 1)], 100) == pytest.approx(2 * 100 / 100)
    assert machine.move_seconds([Save(0, 1), Load(1, 2)], 100) == pytest.approx(2 * 100 / 10)
    assert machine.move_seconds([], 100) == 0


def test_pages_are_what_memory_holds_beside_weights_and_steps():
    shape = SHAPES["llama-3-8b"]
    machine = Machine(shape, DEVICES["h100"])
    layout = KVLayout.of(shape.windows, block_size=16, max_model_len=8192)
    assert machine.page_bytes(layout) == 16 * 131072
    pages = machine.count_pages(CacheConfig(), SchedulerConfig(), layout, max_model_len=8192)
    # 0.9 of 80 GB less the weights, 4 float32 logits of each sequence and activations.
    steps = 4 * (4 * 256 * 128256 + 8192 * (4 * 4096 + 3 * 14336 + 4 * 4096))
    assert pages == (0.9 * 80e9 - 2 * shape.num_params - steps) // (16 * 131072)
    with pytest.raises(ConfigError, match=r"141\.1 GB of weights"):
        Machine(SHAPES["llama-3-70b"], DEVICES["h100"]).count_pages(
            CacheConfig(), SchedulerConfig(), layout, max_model_len=8192
        )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tensor_parallel", 3),
        ("tensor_parallel", 0),
        ("overhead", -1.0),
        ("overhead", float("inf")),
        ("overhead", float("nan")),
        ("memory_efficiency", 0.0),
        ("compute_efficiency", 1.5),
        ("kv_dtype", "float64"),
    ],
)
def test_what_no_machine_can_be_is_refused(option, value):
    with pytest.raises(ConfigError):
        toy(**{option: value})


def test_config_json_gives_the_shape(tmp_path):
    config = {
        "vocab_size": 10,
        "hidden_size": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_shape(str(tmp_path)) == find_shape(str(tmp_path / "config.json")) == TINY
    types = ["sliding_attention", "full_attention"]
    assert read_shape({**config, "sliding_window": 8, "layer_types": types}).windows == (8, None)
    assert read_shape({**config, "sliding_window": 8, "model_type": "mistral"}).windows == (8, 8)
    off = read_shape({**config, "sliding_window": 8, "use_sliding_window": False})
    assert off.windows == (None, None)
    with pytest.raises(UnsupportedModelError, match="sliding_window"):
        read_shape({**config, "sliding_window": 8})
    with pytest.raises(UnsupportedModelError, match="num_experts"):
        read_shape({**config, "num_experts": 8})
    with pytest.raises(CheckpointFormatError, match="hidden_size"):
        read_shape({**config, "hidden_size": None})
    with pytest.raises(ModelNotFoundError, match="llama-3-8b"):
        find_shape(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointFormatError, match="not JSON"):
        find_shape(str(tmp_path))
