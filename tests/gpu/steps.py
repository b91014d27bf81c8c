"""Whole steps of Llama 3 8B, compiled as an engine does; the weights are shapes only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from aot import compile_for
from flax import nnx
from jax.sharding import Mesh
from jaxlib import _jax
from targets import Target

from llmjax.cache.layout import KVLayout
from llmjax.engine.batch import packed_size
from llmjax.engine.buckets import Bucket
from llmjax.engine.step import flatten_once, make_state, make_step
from llmjax.models import Decoder, DecoderConfig
from llmjax.models.config import RopeConfig
from llmjax.simulate.shapes import SHAPES
from llmjax_kernels.kv_format import KV_FORMATS

SHAPE = SHAPES["llama-3-8b"]
CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=SHAPE.vocab_size,
    hidden_size=SHAPE.hidden_size,
    num_layers=SHAPE.num_layers,
    num_heads=SHAPE.num_heads,
    num_kv_heads=SHAPE.num_kv_heads,
    head_dim=SHAPE.head_dim,
    mlp_size=SHAPE.mlp_size,
    max_position=SHAPE.max_position,
    norm_eps=1e-5,
    windows=SHAPE.windows,
    ropes=(RopeConfig(5e5, SHAPE.head_dim),) * SHAPE.num_layers,
    attention_scale=SHAPE.head_dim**-0.5,
)
PAGE_SIZE, NUM_PAGES, SLOTS = 16, 20_000, 256
STEPS = {"decode": Bucket(32, 32, 512), "prefill": Bucket(2048, 8, 512)}
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(.*)")
ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")
MOVES_NOTHING = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant"}


@dataclass(frozen=True)
class CompiledStep:
    """Attributes:
    state: bytes of what outlives a step: all pages, and what sequences remember.
    aliased: bytes of results that take the place of arguments.
    copies: of a layer's pages, in the program.
    temporaries: bytes.
    weights: bytes of weights that are read, however often.
    between: bytes that pass from one operation to the next, written and read.
    operations: of all but attention.
    launches: of Triton kernels.
    """

    state: int
    aliased: int
    copies: int
    temporaries: int
    weights: int
    between: int
    operations: float
    launches: int


def compile_step(
    target: Target, mesh: Mesh, bucket: Bucket, *, donate: tuple[int, ...] = (1,)
) -> CompiledStep:
    model = nnx.eval_shape(lambda: Decoder(CONFIG, jnp.bfloat16))
    graphdef, arrays = nnx.split(model)
    weights, tree = flatten_once(arrays)
    layout = KVLayout.of(CONFIG.windows, block_size=PAGE_SIZE, max_model_len=CONFIG.max_position)
    format = KV_FORMATS["bfloat16"]
    sizes = (layout, NUM_PAGES, SLOTS, CONFIG.max_position)
    state = jax.eval_shape(partial(make_state, CONFIG, *sizes, format, False))
    step = make_step(graphdef, tree, layout, bucket, False)
    packed = jax.ShapeDtypeStruct((packed_size(bucket, layout.num_groups),), jnp.int32)
    compiled = compile_for(target, mesh, step, weights, state, packed, donate=donate)
    return measure(compiled, state)


def measure(compiled: Any, state: Any) -> CompiledStep:
    text = compiled.as_text()
    pages = state.pages[0].k
    shape = ",".join(map(str, pages.shape))
    memory = compiled.memory_analysis()
    weights, between = moved_bytes(text[text.index("\nENTRY") :])
    module = compiled.runtime_executable().hlo_modules()[0]
    cost = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    return CompiledStep(
        state=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
        aliased=memory.alias_size_in_bytes,
        copies=len(re.findall(rf"= \w+\[{shape}\]\S* copy\(", text)),
        temporaries=memory.temp_size_in_bytes,
        weights=weights,
        between=between,
        operations=cost["flops"],
        launches=text.count('custom_call_target="triton_kernel_call"'),
    )


def moved_bytes(entry: str) -> tuple[int, int]:
    """Bytes of weights that the instructions of a program's entry read, and of all that lies
    between two instructions; without the pages, of which attention reads what is needed, and
    without tables from which rows are picked."""
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    weights = between = 0
    for line in entry.splitlines():
        if not (match := INSTRUCTION.match(line)):
            continue
        name, shape, kind, arguments, rest = match.groups()
        operands = re.findall(r"%([\w.\-]+)", arguments)
        sizes[name] = array_bytes(shape)
        origin[name] = origin[operands[0]] if kind == "bitcast" else name
        if kind in MOVES_NOTHING or "triton_kernel_call" in rest:
            continue
        between += sizes[name]
        for operand in operands:
            if origin[operand].startswith("weights"):
                weights += 0 if "gather" in name else sizes[operand]
            elif not origin[operand].startswith("state"):
                between += sizes[operand]
    return weights, between


def array_bytes(shape: str) -> int:
    total = 0
    for dtype, dims in ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
        total += prod(int(n) for n in dims.split(",") if n) * bits // 8
    return total
