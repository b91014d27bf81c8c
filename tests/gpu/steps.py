"""Whole steps of Llama 3, compiled as an engine does; the weights are shapes only."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from aot import compile_for, make_mesh
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxlib import _jax
from targets import Target

from llmjax.cache.layout import KVLayout
from llmjax.engine.batch import packed_size, rows_size
from llmjax.engine.buckets import Bucket
from llmjax.engine.decode_loop import make_loop
from llmjax.engine.ends import ROW_SIZE
from llmjax.engine.step import (
    DeviceState,
    StepOutput,
    flatten_once,
    logits_of,
    make_sampler,
    make_state,
    make_step,
    shardings_of,
    whole_of,
)
from llmjax.models import Decoder, DecoderConfig
from llmjax.models.config import RopeConfig
from llmjax.parallel.rules import KV_PAGES, parameter_sharding
from llmjax.sampling import mask_words
from llmjax.simulate.shapes import SHAPES, ModelShape
from llmjax_kernels.kv_format import KV_FORMATS
from llmjax_kernels.quant_matmul import FORMATS, QuantWeight, divided_shapes, weight_shapes
from llmjax_kernels.triton_call import LAUNCH

PAGE_SIZE, SLOTS, MAX_LOGPROBS = 16, 256, 20
NUM_LAYERS = 4
"""All layers are one: what is counted of four of them, divided, is what each adds. Bytes of
temporaries do not grow with layers, which reuse them."""


@dataclass(frozen=True)
class StepCase:
    """A step of a model over some devices of one host."""

    model: str
    devices: int
    bucket: Bucket
    quantization: str | None = None
    num_pages: int = 20_000

    @property
    def shape(self) -> ModelShape:
        return replace(SHAPES[self.model], num_layers=NUM_LAYERS, windows=())

    @property
    def config(self) -> DecoderConfig:
        shape = self.shape
        return DecoderConfig(
            architecture="LlamaForCausalLM",
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            mlp_size=shape.mlp_size,
            max_position=shape.max_position,
            norm_eps=1e-5,
            windows=shape.windows,
            ropes=(RopeConfig(5e5, shape.head_dim),) * shape.num_layers,
            attention_scale=shape.head_dim**-0.5,
        )

    @property
    def least_weights(self) -> int:
        """Bytes of the weights that a step must read on a device."""
        matrices, head = self.shape.matrix_params, self.shape.head_params
        if self.quantization is None:
            return 2 * (matrices + head) // self.devices
        bits = {"int4": 4 + 2 * 16 / 32, "int8": 8 + 16 / 32}
        total = int(matrices * bits[self.quantization] + head * bits["int8"]) // 8
        return total // self.devices

    @property
    def num_products(self) -> int:
        """Matrix products that are launches of Triton kernels."""
        return 7 * self.shape.num_layers + 1 if self.quantization else 0


STEPS = {
    "8B, decode": StepCase("llama-3-8b", 1, Bucket(32, 32, 512)),
    "8B, prefill": StepCase("llama-3-8b", 1, Bucket(2048, 8, 512)),
    "8B, int4 decode": StepCase("llama-3-8b", 1, Bucket(32, 32, 512), "int4"),
    "8B, int4 prefill": StepCase("llama-3-8b", 1, Bucket(2048, 8, 512), "int4"),
    "70B on 8, decode": StepCase("llama-3-70b", 8, Bucket(64, 64, 512)),
    "70B on 8, prefill": StepCase("llama-3-70b", 8, Bucket(2048, 8, 512)),
    "70B on 8, int4 decode": StepCase("llama-3-70b", 8, Bucket(64, 64, 512), "int4"),
}
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(.*)")
ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")
MOVES_NOTHING = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant"}


KERNEL = re.compile(f'custom_call_target="({LAUNCH}|mosaic_gpu_v2)"')
THUNK = re.compile(r"^\d+: k(\w+)", re.MULTILINE)
COLLECTIVE = re.compile(r"= (.*?) (all-[\w]+|reduce-scatter|collective-[\w]+)(-start)?\(")


@dataclass(frozen=True)
class CompiledStep:
    """Of one device.

    Attributes:
        state: bytes of what outlives a step: all pages, and what sequences remember.
        aliased: bytes of results that take the place of arguments.
        copies: of a layer's pages, in the program.
        temporaries: bytes.
        weights: bytes of weights that are read, however often.
        between: bytes that pass from one operation to the next, written and read.
        operations: of all but attention.
        launches: of kernels of ours.
        collectives: the kind and the bytes of each.
        thunks: what the host sends to the device, one after the other: a command buffer (a CUDA
            graph) or what is in none.
    """

    state: int
    aliased: int
    copies: int
    temporaries: int
    weights: int
    between: int
    operations: float
    launches: int
    collectives: list[tuple[str, int]]
    thunks: list[str]


def compile_step(target: Target, case: StepCase) -> CompiledStep:
    """The model's part of a step, compiled as `StepPrograms` does."""
    config, devices = case.config, make_mesh(target, case.devices)
    mesh = devices if case.devices > 1 else None
    graphdef, arrays = nnx.split(nnx.eval_shape(lambda: Decoder(config, jnp.bfloat16)))
    if case.quantization:
        arrays = quantised(arrays, case.quantization)
    if mesh is not None:
        arrays = laid_out(arrays, mesh)
    weights, tree = flatten_once(arrays)
    layout = KVLayout.of(config.windows, block_size=PAGE_SIZE, max_model_len=config.max_position)
    state = make_state_shapes(config, layout, case.num_pages, mesh)
    step = make_step(graphdef, tree, layout, case.bucket, False, mesh)
    size = packed_size(case.bucket, layout.num_groups)
    packed = jax.ShapeDtypeStruct((size,), jnp.int32)
    out = None
    if mesh is not None:
        outputs = StepOutput(logits_of(mesh, config.vocab_size), whole_of(mesh))
        out = (shardings_of(state), outputs)
    with tempfile.TemporaryDirectory() as dump:
        args = (weights, state, packed)
        compiled = compile_for(target, devices, step, *args, donate=(1,), out=out, dump=dump)
        [thunks] = Path(dump).glob("*thunk_sequence_after_thunk_passes.txt")
        sent = THUNK.findall(thunks.read_text())
    return measure(compiled, state, sent)


def compile_loop(target: Target, case: StepCase, num_steps: int) -> tuple[int, int, int]:
    """Several steps of decodes on one device, as `LoopPrograms` compiles them: bytes of the state,
    bytes of results that take the place of arguments, and copies of a layer's pages."""
    config, devices, S = case.config, make_mesh(target), case.bucket.seqs
    graphdef, arrays = nnx.split(nnx.eval_shape(lambda: Decoder(config, jnp.bfloat16)))
    weights, tree = flatten_once(arrays)
    layout = KVLayout.of(config.windows, block_size=PAGE_SIZE, max_model_len=config.max_position)
    state = make_state_shapes(config, layout, case.num_pages, None)
    step = make_step(graphdef, tree, layout, case.bucket, False)
    sampler = make_sampler(S, MAX_LOGPROBS)
    loop = make_loop(step, sampler, case.bucket, layout.num_groups, num_steps, MAX_LOGPROBS)
    sizes = (packed_size(case.bucket, layout.num_groups),), (rows_size(S),), (S, ROW_SIZE)
    packed = [jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes]
    compiled = compile_for(target, devices, loop, weights, state, *packed, donate=(1,))
    aliased = compiled.memory_analysis().alias_size_in_bytes
    return state_bytes(state), aliased, page_copies(compiled.as_text(), state)


def quantised(state: nnx.State, quantization: str) -> nnx.State:
    """With the weights that `--quantization` makes."""

    def of(path: tuple, leaf: Any) -> Any:
        if len(leaf.shape) != 2:
            return leaf
        name = "int8" if path[0] == "head" else quantization
        return leaf.replace(weight_shapes(*leaf.shape, FORMATS[name]))

    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, of(path, leaf)) for path, leaf in flat])


def compile_sampler(target: Target, case: StepCase) -> list[tuple[str, int]]:
    """The kind and bytes of each collective of the sampler."""
    S, V, mesh = case.bucket.seqs, case.config.vocab_size, make_mesh(target, case.devices)
    layout = KVLayout.of(case.config.windows, block_size=PAGE_SIZE, max_model_len=8192)
    state = make_state_shapes(case.config, layout, 1, mesh)
    logits = jax.ShapeDtypeStruct((S, V), jnp.float32, sharding=logits_of(mesh, V))
    rows = jax.ShapeDtypeStruct((rows_size(S),), jnp.int32)
    masks = jax.ShapeDtypeStruct((S, mask_words(V)), jnp.int32)
    shapes = (state.history, state.bias, logits, rows, masks)
    sampler = make_sampler(S, MAX_LOGPROBS, mesh)
    compiled = compile_for(target, mesh, sampler, *shapes, donate=(0,), out=whole_of(mesh))
    return collectives(compiled.as_text())


def laid_out(arrays: nnx.State, mesh: Mesh) -> nnx.State:
    """Shapes of parameters, with their places."""
    flat = []
    for keys, leaf in nnx.to_flat_state(arrays):
        value = leaf.get_value()
        sharding = parameter_sharding(".".join(map(str, keys)), value.shape, mesh)
        if isinstance(value, QuantWeight):
            shapes = divided_shapes(*value.shape, value.format, sharding)
        else:
            shapes = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        flat.append((keys, leaf.replace(shapes)))
    return nnx.from_flat_state(flat)


def make_state_shapes(
    config: DecoderConfig, layout: KVLayout, num_pages: int, mesh: Mesh | None
) -> DeviceState:
    sizes = (layout, num_pages, SLOTS, config.max_position)
    state = jax.eval_shape(partial(make_state, config, *sizes, KV_FORMATS["bfloat16"], False))
    if mesh is None:
        return state
    pages, whole = NamedSharding(mesh, KV_PAGES), whole_of(mesh)

    def placed(tree: Any, sharding: NamedSharding | None) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    return replace(placed(state, whole), pages=placed(state.pages, pages))


def measure(compiled: Any, state: DeviceState, thunks: list[str]) -> CompiledStep:
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    weights, between = moved_bytes(text)
    module = compiled.runtime_executable().hlo_modules()[0]
    cost = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    return CompiledStep(
        state=state_bytes(state),
        aliased=memory.alias_size_in_bytes,
        copies=page_copies(text, state),
        temporaries=memory.temp_size_in_bytes,
        weights=weights,
        between=between,
        operations=cost["flops"],
        launches=len(KERNEL.findall(text)),
        collectives=collectives(text),
        thunks=thunks,
    )


def state_bytes(state: DeviceState) -> int:
    """What of it one device has."""
    return sum(bytes_of_one(x)[1] for x in jax.tree.leaves(state))


def page_copies(text: str, state: DeviceState) -> int:
    """Of a layer's pages, in a program."""
    shape = ",".join(map(str, bytes_of_one(state.pages[0].k)[0]))
    return len(re.findall(rf"= \w+\[{shape}\]\S* copy\(", text))


def bytes_of_one(x: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], int]:
    """Shape and bytes of what one device has."""
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return shape, prod(shape) * x.dtype.itemsize


def collectives(text: str) -> list[tuple[str, int]]:
    found = []
    for shape, kind, start in COLLECTIVE.findall(text):
        # One that runs beside others has what it is given in its type, before what it gives.
        given = shape.rpartition("), ")[2] if start else shape
        found.append((kind, array_bytes(given)))
    return found


def moved_bytes(text: str) -> tuple[int, int]:
    """Bytes of weights that the instructions of a program's entry read, and of all that lies
    between two instructions; without the pages, of which attention reads what is needed, and
    without tables from which rows are picked."""
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    tables = picked_from(text)
    # XLA puts a kernel into a fusion with the slices of what it takes.
    launching = {name for name, block in computations(text) if KERNEL.search(block)}
    weights = between = 0
    for line in text[text.index("\nENTRY") :].splitlines():
        if not (match := INSTRUCTION.match(line)):
            continue
        name, shape, kind, arguments, rest = match.groups()
        operands = re.findall(r"%([\w.\-]+)", arguments)
        sizes[name] = array_bytes(shape)
        origin[name] = origin[operands[0]] if kind == "bitcast" else name
        if kind == "parameter":  # of a program for several devices it has lost its name
            origin[name] = re.search(r'op_name="([^"]*)"', rest)[1]
        if kind in MOVES_NOTHING:
            continue
        callee = "".join(re.findall(r"calls=%([\w.\-]+)", rest))
        is_kernel = KERNEL.search(rest) or callee in launching
        between += 0 if is_kernel else sizes[name]
        called = tables.get(callee, set())
        for place, operand in enumerate(operands):
            if origin[operand].startswith("weights"):
                weights += 0 if place in called else sizes[operand]
            elif not (is_kernel or origin[operand].startswith("state")):
                between += sizes[operand]
    return weights, between


def computations(text: str) -> Iterator[tuple[str, str]]:
    """Those that a program's entry calls: name and text."""
    for block in text.split("\n\n"):
        if title := re.search(r"^%([\w.\-]+) \(", block, re.MULTILINE):
            yield title[1], block


def picked_from(text: str) -> dict[str, set[int]]:
    """Parameters of each computation of which only rows are picked, by its name."""
    found: dict[str, set[int]] = {}
    for title, block in computations(text):
        parameters: dict[str, int] = {}
        rows, whole = set(), set()
        for name, _, kind, arguments, _ in map(re.Match.groups, INSTRUCTION.finditer(block)):
            if kind == "parameter":
                parameters[name] = int(arguments)
            operands = re.findall(r"%([\w.\-]+)", arguments)
            picked = operands[:1] if kind == "gather" else []
            rows |= {*picked}
            whole |= {*operands[len(picked) :]}
        found[title] = {parameters[x] for x in rows - whole if x in parameters}
    return found


def array_bytes(shape: str) -> int:
    total = 0
    for dtype, dims in ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
        total += prod(int(n) for n in dims.split(",") if n) * bits // 8
    return total
