"""How kernels are cut where that was measured, and how it is found; no GPU need be here."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from llmjax.bench import tune, tune_cases
from llmjax.engine.buckets import Bucket
from llmjax.errors import ConfigError
from llmjax.models.config import DecoderConfig, RopeConfig
from llmjax_kernels import tuned
from llmjax_kernels.gpu import Gpu
from llmjax_kernels.kv_format import KV_FORMATS
from llmjax_kernels.paged_attention import shapes as attention
from llmjax_kernels.quant_matmul import FORMATS, InputFormat, QuantFormat, weight_shapes
from llmjax_kernels.quant_matmul.args import QuantMatmulArgs
from llmjax_kernels.quant_matmul.shapes import OP, Shape, by_rule, choose_shape, size_of
from llmjax_serving.cli import main

KIND = "NVIDIA H100 80GB HBM3"
H100 = Gpu(90, 132, KIND)
MEASURED = Shape(16, 64, 32, 8, 6, 4)
CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=264,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=96,
    max_position=64,
    norm_eps=1e-5,
    windows=(None, None),
    ropes=(RopeConfig(1e4, 16),) * 2,
    attention_scale=0.25,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    tuned._read.cache_clear()
    yield tmp_path
    tuned._read.cache_clear()


def product(M=16, N=4096, K=4096, format=FORMATS["int4"]):
    x = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
    return QuantMatmulArgs(x, weight_shapes(N, K, format), jnp.dtype(jnp.bfloat16))


def test_what_was_measured_is_taken_on_that_kind_of_device_alone():
    path = tuned.save(KIND, OP, {size_of(product()): MEASURED._asdict()})
    assert path.name == "nvidia-h100-80gb-hbm3.json"
    assert choose_shape(product(), H100) == MEASURED
    assert choose_shape(product(9), H100) == MEASURED  # rows count up to a power of two
    for args, gpu in [
        (product(), H100._replace(kind="NVIDIA H200")),
        (product(), H100._replace(kind="")),
        (product(17), H100),
        (product(N=4097), H100),
        (product(format=FORMATS["int8"]), H100),
    ]:
        assert choose_shape(args, gpu) == by_rule(args, gpu) != MEASURED


def test_later_measurements_are_added():
    tuned.save(KIND, OP, {"a": {"x": 1}, "b": {"x": 2}})
    tuned.save(KIND, "another op", {"a": {"x": 3}})
    path = tuned.save(KIND, OP, {"b": {"x": 4}})
    assert json.loads(path.read_text()) == {
        "device": KIND,
        OP: {"a": {"x": 1}, "b": {"x": 4}},
        "another op": {"a": {"x": 3}},
    }


def test_the_files_that_are_shipped_can_be_read(monkeypatch):
    monkeypatch.undo()
    for path in tuned.FOLDER.glob("*.json"):
        data = json.loads(path.read_text())
        assert tuned.path_of(data["device"]) == path
        assert all(Shape(**fields) for fields in data.get(OP, {}).values())
        assert all(attention.Shape(**fields) for fields in data.get(attention.OP, {}).values())


def distance(shape, best):
    return sum(abs(math.log2(a / b)) for a, b in zip(shape, best, strict=True))


def case(seconds, args=None):
    made = tune_cases.product_case(args or product(), H100)
    return made._replace(seconds=seconds)


def test_the_search_goes_to_the_fastest_and_times_nothing_twice():
    best, timed = Shape(32, 256, 32, 8, 6, 8), []

    def seconds(shape):
        timed.append(shape)
        return math.inf if shape.splits > 16 else 1 + distance(shape, best)  # does not compile

    start = by_rule(product(), H100)
    found, before, after = tune.search(case(seconds))
    assert (found, after) == (best, 1)
    assert before == 1 + distance(start, best)
    assert len(timed) == len(set(timed))


def test_the_search_stays_where_nothing_is_clearly_faster():
    start = by_rule(product(), H100)
    found, before, _ = tune.search(case(lambda s: 1.0 if s == start else 0.99))
    assert (found, before) == (start, 1)
    with pytest.raises(ConfigError, match="cannot be computed"):
        tune.search(case(lambda _: math.inf))


@pytest.mark.parametrize(
    "format", [FORMATS["int4"], QuantFormat("fp8_e4m3", 128, inputs=InputFormat("fp8_e4m3", 128))]
)
def test_only_shapes_that_fit_the_groups_are_tried(format):
    seen = []
    tune.search(case(lambda s: seen.append(s) or 1.0, product(format=format)))
    assert len(seen) > 10
    assert {shape.block_k for shape in seen} == {format.group}


def test_the_products_of_a_model():
    sizes = {"int4": 4, "fp8": 4}  # q and o, k and v, gate and up, down
    for name, count in sizes.items():
        ends = name != "fp8"
        found = tune_cases.products_of(CONFIG, name, (1, 16, 40))
        assert len(found) == 2 * (count + ends)  # 1 row is cut as 16 are
        assert len({size_of(args) for args in found}) == len(found)
        logits = [args for args in found if args.weight.shape[0] == CONFIG.vocab_size]
        assert [args.weight.format for args in logits] == [FORMATS["int8"]] * 2 * ends


BUCKETS = (Bucket(8, 8, 4), Bucket(8, 8, 8), Bucket(8, 8, 7), Bucket(64, 8, 8))


def attentions(kv="bfloat16", config=CONFIG):
    return tune_cases.attentions_of(config, KV_FORMATS[kv], BUCKETS, 16)


def test_the_attention_of_a_model():
    sizes = list(map(attention.size_of, attentions()))
    assert sizes == [  # of 7 pages and of 8 alike
        "decode 4/2x16 bfloat16 bfloat16 8x8x64",
        "decode 4/2x16 bfloat16 bfloat16 8x8x128",
        "mixed 4/2x16 bfloat16 bfloat16 64x8x128",
    ]
    assert "int8" in attention.size_of(attentions("int8")[0])
    assert attentions()[0].spec.window is None
    windowed = replace(CONFIG, windows=(32, 32))
    assert attentions(config=windowed)[0].spec.window == 32


def test_steps_that_are_timed_fill_their_buckets():
    for args in attentions():
        batch, (T, S) = tune_cases._full(args), (args.q.shape[0], len(args.batch.kv_lens))
        assert jax.tree.map(jnp.shape, batch) == jax.tree.map(jnp.shape, args.batch)
        assert batch.query_starts[-1] == T and bool(batch.is_token.all())
        assert batch.kv_lens.tolist() == [batch.block_tables.shape[1] * 16] * S
        assert int(batch.block_tables.max()) < args.kv.k.shape[0]


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_attention_is_cut_as_was_measured(kv):
    for args in attentions(kv):
        start = attention.by_rule(args, H100)
        near = list(attention.candidates(args, start))
        assert len(near) > 8 and start not in near
        best = near[-1]
        made = tune_cases.attention_case(args, H100)
        found, _, after = tune.search(
            made._replace(seconds=lambda s, best=best: 1 + distance(s, best))
        )
        assert (found, after) == (best, 1)
        tuned.save(KIND, made.op, {made.size: found._asdict()})
        assert attention.choose_shape(args, H100) == best
        other = H100._replace(kind="NVIDIA H200")
        assert attention.choose_shape(args, other) == attention.by_rule(args, other)


def test_what_is_found_is_written_down(monkeypatch, folder):
    monkeypatch.setattr(tune, "target", lambda: H100)
    monkeypatch.setattr(tune, "available", lambda: True)

    def timed(function, inputs, read, shape):
        return 1 + distance(shape, MEASURED) if isinstance(shape, Shape) else 1.0

    monkeypatch.setattr(tune_cases, "_timed", timed)
    path = tune.tune(CONFIG, "int4", (8,))
    assert path.parent == folder
    for args in tune_cases.products_of(CONFIG, "int4", (8,)):
        assert choose_shape(args, H100) == MEASURED
    kept = json.loads(path.read_text())[attention.OP]
    assert any(size.startswith("decode") for size in kept)
    assert any(size.startswith("mixed") for size in kept)
    assert all(attention.Shape(**fields) for fields in kept.values())


def test_without_a_gpu_the_command_says_so(tiny_model, capsys):
    with pytest.raises(ConfigError, match="there is none here"):
        tune.tune(CONFIG, "int4", (8,))
    assert main(["tune", str(tiny_model), "--quantization", "int4"]) == 1
    assert "times kernels on an NVIDIA GPU" in capsys.readouterr().err
    assert main(["tune", "x", "--quantization", "int4", "--tokens", "0"]) == 1
    assert "--tokens" in capsys.readouterr().err
    assert main(["tune", "x", "--tokens", "16"]) == 1
    assert "allowed with --quantization alone" in capsys.readouterr().err
