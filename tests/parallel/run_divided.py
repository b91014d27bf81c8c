"""Run by a test on virtual devices: products with weights that they share, beside one device's.

run_divided.py DEVICES
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmjax_kernels.quant_matmul import (
    InputFormat,
    QuantFormat,
    QuantWeight,
    divided_shapes,
    make_weight,
    quant_matmul,
    quant_rows,
)

[devices] = map(json.loads, sys.argv[1:])
M, N, K = 5, 48, 384
BY_OUTPUTS, BY_INPUTS = PartitionSpec("tensor", None), PartitionSpec(None, "tensor")
FORMATS = {
    "int4": QuantFormat("int4", 32, minima=True),
    "int4, whole rows": QuantFormat("int4"),
    "int8 by int8": QuantFormat("int8", inputs=InputFormat("int8")),
    "fp8 by fp8, blocks": QuantFormat("fp8_e4m3", 64, inputs=InputFormat("fp8_e4m3", 64)),
    "int8, zero points": QuantFormat("int8", inputs=InputFormat("int8", symmetric=False)),
    "int8, static": QuantFormat("int8", inputs=InputFormat("int8", static=True)),
    "nvfp4": QuantFormat("fp8_e4m3", 16, inputs=InputFormat("e2m1", 16, scales="e4m3")),
    "LLM.int8": QuantFormat("int8", inputs=InputFormat("int8", threshold=1.5)),
}
LAYOUTS = {
    **{f"{name}, by inputs": (format, BY_INPUTS) for name, format in FORMATS.items()},
    "int4, by outputs": (FORMATS["int4"], BY_OUTPUTS),
    "int8 by int8, by outputs": (FORMATS["int8 by int8"], BY_OUTPUTS),
    "int4, whole": (FORMATS["int4"], PartitionSpec()),
}
mesh = Mesh(jax.devices()[:devices], ("tensor",))


def weight_of(format: QuantFormat, rng: np.random.Generator) -> QuantWeight:
    codes = rng.integers(0, 16, (N, K)) if format.code == "int4" else rng.integers(0, 100, (N, K))
    groups, _, _ = format.codes_shape(N, K)
    scales = rng.uniform(0.5, 1, (groups, N))
    minima = rng.uniform(-9, 1, (groups, N)) if format.minima else None
    static = None
    if format.inputs is not None and format.inputs.needs_static:
        static = jnp.asarray([900, 0] if format.inputs.scales == "e4m3" else [0.02, 0], jnp.float32)
    return make_weight(jnp.asarray(codes), scales, format, minima=minima, static_inputs=static)


def compare(format: QuantFormat, spec: PartitionSpec) -> dict:
    rng = np.random.default_rng(0)
    layout, weight = NamedSharding(mesh, spec), weight_of(format, rng)
    # One device has the greatest values.
    x = rng.standard_normal((M, K)) * np.where(np.arange(K) < K // 8, 3, 1)
    x = jnp.asarray(x, jnp.float32)
    shapes = divided_shapes(N, K, format, layout)
    shared = jax.tree.map(
        lambda a, s: jax.device_put(a, s.sharding), replace(weight, layout=layout), shapes
    )
    everywhere = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
    program = jax.jit(quant_matmul).lower(everywhere, shared).compile()
    one = np.asarray(jax.jit(quant_matmul)(x, weight))
    ids = jnp.asarray([3, N - 1, 0, 3])
    rows = {}
    if spec != BY_INPUTS:
        found = jax.jit(quant_rows)(shared, ids)
        rows = {"rows": bool((found == jax.jit(quant_rows)(weight, ids)).all())}
    return rows | {
        "error": float(
            np.abs(np.asarray(program(everywhere, shared)) - one).max() / np.abs(one).max()
        ),
        "all_reduces": program.as_text().count(" all-reduce("),
        "share": shared.codes.addressable_shards[0].data.nbytes / weight.codes.nbytes,
    }


print(json.dumps({name: compare(*layout) for name, layout in LAYOUTS.items()}))
