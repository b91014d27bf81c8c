"""Finds how kernels are best cut on the GPU that is here, by timing."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from llmjax_kernels import tuned
from llmjax_kernels.gpu import target
from llmjax_kernels.quant_matmul import QuantWeight, format_here, jax_triton, weight_shapes
from llmjax_kernels.quant_matmul.args import QuantMatmulArgs
from llmjax_kernels.quant_matmul.shapes import OP, Shape, by_rule, candidates, size_of
from llmjax_kernels.triton_call import available
from llmjax_kernels.weight_format import QUANTISATIONS

from ..errors import ConfigError
from ..models import Decoder, DecoderConfig

log = logging.getLogger(__name__)

CACHED = 1 << 28
"""Bytes: several times a GPU's L2 cache, out of which no weight is to come."""
RUNS = 20
GAIN = 0.98
"""A shape replaces another if it takes less than this share of its time: not by noise."""
Seconds = Callable[[QuantMatmulArgs, Shape], float]
"""What a product takes; infinite where it cannot be computed so."""


def tune(
    config: DecoderConfig,
    quantization: str,
    rows: Sequence[int],
    folder: Path | None = None,
) -> Path:
    """Times the products of a model and writes down what was best; the file.

    Args:
        rows: numbers of tokens in a step.
        folder: for the file; by default where kernels look.

    Raises:
        ConfigError: there is no GPU on which Triton serves.
    """
    gpu = target()
    if gpu is None or not available():
        raise ConfigError(
            "llmjax tune times kernels on an NVIDIA GPU with Triton (the extra `gpu`), and there "
            "is none here"
        )
    found: dict[str, dict[str, int]] = {}
    for args in products_of(config, quantization, rows):
        rule = by_rule(args, gpu)
        best, before, after = search(args, rule, _seconds)
        log.info("%s: %s, %.1f us (by rule %.1f)", size_of(args), best, 1e6 * after, 1e6 * before)
        found[size_of(args)] = best._asdict()
    return tuned.save(gpu.kind, OP, found, folder)


def products_of(
    config: DecoderConfig, quantization: str, rows: Iterable[int]
) -> list[QuantMatmulArgs]:
    """Shapes of the products of a decoder, each size once."""
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, jnp.dtype(jnp.bfloat16))))
    head = "embed" if config.tie_embeddings else "head"
    found: dict[str, QuantMatmulArgs] = {}
    for path, leaf in nnx.to_flat_state(state):
        name, ends = quantization, path[0] in ("embed", "head")
        if len(leaf.shape) != 2 or (ends and (path[0] != head or name not in QUANTISATIONS)):
            continue
        format = format_here("int8" if ends else name)
        for M in rows:
            N, K = leaf.shape
            x = jax.eval_shape(partial(jnp.zeros, (M, K), jnp.bfloat16))
            out_dtype = jnp.dtype(jnp.float32 if ends else jnp.bfloat16)
            args = QuantMatmulArgs(x, weight_shapes(N, K, format), out_dtype)
            found.setdefault(size_of(args), args)
    return list(found.values())


def search(args: QuantMatmulArgs, start: Shape, seconds: Seconds) -> tuple[Shape, float, float]:
    """The best shape that single steps from `start` lead to; what it takes before and after.

    Raises:
        ConfigError: `start` itself cannot be computed.
    """
    known = {start: seconds(args, start)}
    if math.isinf(known[start]):
        raise ConfigError(f"{size_of(args)} cannot be computed as {start}")
    best = start
    while True:
        for shape in candidates(args, best):
            if shape not in known:
                known[shape] = seconds(args, shape)
        nearest = min(candidates(args, best), key=known.__getitem__)
        if known[nearest] >= GAIN * known[best]:
            return best, known[start], known[best]
        best = nearest


def _seconds(args: QuantMatmulArgs, shape: Shape) -> float:
    """Of one product on the device, its weight read from memory."""
    gpu = target()
    assert gpu is not None

    def zeros(weight: QuantWeight) -> QuantWeight:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), weight)

    def product(x: jax.Array, weight: QuantWeight) -> jax.Array:
        return jax_triton.run_as(QuantMatmulArgs(x, weight, args.out_dtype), shape, gpu)

    weights = [zeros(args.weight) for _ in range(max(2, CACHED // _nbytes(args.weight)))]
    x = jnp.ones(args.x.shape, args.x.dtype)
    try:
        compiled = jax.jit(product).lower(x, weights[0]).compile()
        jax.block_until_ready(compiled(x, weights[0]))
    except jax.errors.JaxRuntimeError as error:  # too much shared memory, say
        log.debug("%s: %s", shape, error)
        return math.inf
    began = time.perf_counter()
    results = [compiled(x, weights[i % len(weights)]) for i in range(RUNS)]
    jax.block_until_ready(results)
    return (time.perf_counter() - began) / RUNS


def _nbytes(tree: QuantWeight) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
