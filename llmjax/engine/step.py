"""The jitted step: packed host data in, logits out, pages updated in place; then the sampler.

They are two programs, as a row's mask may depend on the token before, which the host gets to see
while the model is computing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int

from llmjax_kernels.kv_format import KVFormat
from llmjax_kernels.layout import PagedKV
from llmjax_kernels.native.blocks import make_pages

from ..cache.layout import KVLayout
from ..checkpoint import LoadedModel
from ..models import Decoder, DecoderConfig
from ..nn.attention import PagedContext
from ..nn.native import NativeContext
from ..parallel.rules import KV_PAGES, LOGITS
from ..request import MAX_LOGIT_BIAS
from ..sampling import BiasTable, SampledTokens, mask_words, sample
from .batch import packed_size, rows_size, unpack, unpack_rows
from .buckets import Bucket


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """All that outlives a step on the device; donated to each step and handed on.

    Attributes:
        pages: a pool of keys and values for each layer of a group; with native kernels one
            for all of them.
        history: every token of each running sequence, by slot and position.
        bias: logit bias entries by slot.
    """

    pages: tuple[PagedKV, ...]
    history: Int[Array, "slots max_len"]
    bias: BiasTable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What the model computed: each row's logits, and each token's final hidden state."""

    logits: Float[Array, "S V"]
    hidden: Float[Array, "T D"]


class Program(NamedTuple):
    """The compiled parts of a bucket's step.

    Attributes:
        step: `(weights, state, packed) -> (state, StepOutput)`; the state is donated.
        sample: `(history, bias, logits, packed rows, masks) -> (history, SampledTokens)`; the
            history is donated.
        loop: several steps of both; see `decode_loop.LoopPrograms`.
    """

    step: Any
    sample: Any
    loop: Any = None


class WeightsTree(NamedTuple):
    """How a model's state is made again from its arrays: `places` of its leaves among them."""

    treedef: Any
    places: tuple[int, ...]

    def unflatten(self, arrays: Sequence[Array]) -> Any:
        return jax.tree.unflatten(self.treedef, [arrays[i] for i in self.places])


def flatten_once(state: nnx.State) -> tuple[list[Array], WeightsTree]:
    """The arrays of a state, each once: packed weights share one."""
    leaves, treedef = jax.tree.flatten(state)
    arrays = list({id(leaf): leaf for leaf in leaves}.values())
    places = {id(array): i for i, array in enumerate(arrays)}
    return arrays, WeightsTree(treedef, tuple(places[id(leaf)] for leaf in leaves))


Step = Callable[[list[Array], DeviceState, Array], tuple[DeviceState, StepOutput]]
Sampler = Callable[[Array, BiasTable, Array, Array, Array], tuple[Array, SampledTokens]]


def make_state(
    config: DecoderConfig,
    layout: KVLayout,
    num_pages: int,
    slots: int,
    max_len: int,
    format: KVFormat,
    native: bool,
) -> DeviceState:
    """A state of zeros: `num_pages` pages, `slots` sequences."""
    size = (num_pages, layout.block_size, config.num_kv_heads)

    def pools() -> list[PagedKV]:
        if native:
            return [make_pages(layout.layers_per_page, *size, config.head_dim, format)]
        shape = (*size, format.width(config.head_dim))
        layers = range(layout.layers_per_page)
        zeros = [[jnp.zeros(shape, format.storage) for _ in "kv"] for _ in layers]
        return [PagedKV(k, v, format) for k, v in zeros]

    bias_shape = (slots, MAX_LOGIT_BIAS)
    return DeviceState(
        pages=tuple(pools()),
        history=jnp.zeros((slots, max_len), jnp.int32),
        bias=BiasTable(
            ids=jnp.zeros(bias_shape, jnp.int32),
            values=jnp.zeros(bias_shape, jnp.float32),
            until=jnp.zeros(bias_shape, jnp.int32),
        ),
    )


class StepPrograms:
    """Compiles the steps of a loaded model.

    Args:
        slots: sequences that run at once.
        max_model_len: tokens a sequence may reach.

    Attributes:
        weights: the model's arrays, as every program takes them.
        tree: how the model's state is made of them.
        cuts: where the pools of each stage are among the state's pages.
    """

    def __init__(
        self,
        model: LoadedModel,
        layout: KVLayout,
        kv_format: KVFormat,
        *,
        slots: int,
        max_model_len: int,
        max_logprobs: int,
    ):
        self.weights, self.tree = flatten_once(model.state)
        self.model, self.layout, self._kv_format = model, layout, kv_format
        self._slots, self._max_model_len = slots, max_model_len
        self._max_logprobs = max_logprobs
        self.cuts = [slice(None)]

    @property
    def parts(self) -> list[StepPrograms]:
        """Those of each stage."""
        return [self]

    @property
    def head(self) -> tuple[LoadedModel, list[Array], WeightsTree]:
        """The model that gives logits, and its weights."""
        return self.model, self.weights, self.tree

    def make_state(self, num_pages: int) -> DeviceState:
        """A state of zeros."""
        make = partial(self._zeros, num_pages)
        if self.model.mesh is None:
            with jax.default_device(self.model.place.device):
                return make()
        return jax.jit(make, out_shardings=shardings_of(self.state_shapes(num_pages)))()

    def state_shapes(self, num_pages: int) -> DeviceState:
        """The shapes of a state's arrays, and how they are laid out over devices."""
        shapes, place = jax.eval_shape(partial(self._zeros, num_pages)), self.model.place
        whole, pages = place.sharding(PartitionSpec()), place.sharding(KV_PAGES)

        def laid_out(tree: Any, sharding: Sharding) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
            )

        return replace(laid_out(shapes, whole), pages=laid_out(shapes.pages, pages))

    def _zeros(self, num_pages: int) -> DeviceState:
        return make_state(
            self.model.config,
            self.layout,
            num_pages,
            self._slots,
            self._max_model_len,
            self._kv_format,
            self.model.native,
        )

    def compile(
        self, bucket: Bucket, num_pages: int, x: jax.ShapeDtypeStruct | None = None
    ) -> Program:
        """The program of a bucket.

        Args:
            x: what the last stage of several is given besides.
        """
        model, whole = self.model, whole_of(self.model.mesh)
        state = self.state_shapes(num_pages)
        of_logits = logits_of(model.mesh, model.config.vocab_size)
        outputs = StepOutput(of_logits, whole)  # type: ignore[arg-type]
        out = (shardings_of(state), None if model.mesh is None else outputs)
        given = () if x is None else (x,)
        compiled = (
            jax.jit(self._make_step(bucket), donate_argnums=1, out_shardings=out)
            .lower(shapes_of(self.weights), state, self._packed(bucket), *given)
            .compile()
        )
        return Program(compiled, self._compile_sampler(bucket.seqs, state))

    def _make_step(self, bucket: Bucket) -> Step:
        model = self.model
        return make_step(model.graphdef, self.tree, self.layout, bucket, model.native, model.mesh)

    def _packed(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        size, whole = packed_size(bucket, self.layout.num_groups), whole_of(self.model.mesh)
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=whole)

    def _compile_sampler(self, S: int, state: DeviceState) -> Any:
        mesh, whole = self.model.mesh, state.history.sharding
        V = self.model.config.vocab_size
        shape = jax.ShapeDtypeStruct
        logits = shape((S, V), jnp.float32, sharding=logits_of(mesh, V) or whole)
        rows = shape((rows_size(S),), jnp.int32, sharding=whole_of(mesh))
        masks = shape((S, mask_words(V)), jnp.int32, sharding=whole)
        sampler = make_sampler(S, self._max_logprobs, mesh)
        # Every process reads what was sampled.
        jitted = jax.jit(sampler, donate_argnums=0, out_shardings=whole)
        return jitted.lower(state.history, state.bias, logits, rows, masks).compile()

    def temporaries(self, bucket: Bucket, num_pages: int) -> int:
        """Bytes that a step of this bucket takes beside weights and state, as XLA planned it.

        Kernels that allocate for themselves (the native ones) are not in it.
        """
        return temporaries_of(self.compile(bucket, num_pages))


def temporaries_of(program: Program) -> int:
    """Bytes that a compiled step takes beside weights and state, or several as one."""
    model, sampler = program.step.memory_analysis(), program.sample.memory_analysis()
    results = model.output_size_in_bytes - model.alias_size_in_bytes
    one = results + max(model.temp_size_in_bytes, sampler.temp_size_in_bytes)
    if program.loop is None:
        return one
    loop = program.loop.memory_analysis()
    several = loop.output_size_in_bytes - loop.alias_size_in_bytes + loop.temp_size_in_bytes
    return max(one, several)


def shardings_of(tree: Any) -> Any:
    """The layouts of arrays."""
    return jax.tree.map(lambda x: x.sharding, tree)


def shapes_of(tree: Any) -> Any:
    """Shapes, types and places of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def whole_of(mesh: Mesh | None) -> NamedSharding | None:
    """The layout of what every device has."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def logits_of(mesh: Mesh | None, V: int) -> NamedSharding | None:
    """That of logits: of some tokens each, where the devices divide the vocabulary."""
    if mesh is None or V % mesh.shape["tensor"]:
        return whole_of(mesh)
    return NamedSharding(mesh, LOGITS)


def over_vocabulary(function: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """`function(logits, ...)` on logits that devices share, in a program.

    Left to XLA, sampling would talk between devices at every turn of its loops.

    Args:
        function: of `llmjax.sampling`; takes the `axis` that divides the vocabulary.
    """

    def call(logits: Float[Array, "R V"], *rest: Any) -> Any:
        layout, whole = logits_of(mesh, logits.shape[1]), PartitionSpec()
        if layout is None:
            return function(logits, *rest)
        return jax.shard_map(
            partial(function, axis=None if layout.is_fully_replicated else "tensor"),
            mesh=mesh,
            in_specs=(layout.spec, *[whole] * len(rest)),
            out_specs=whole,
            check_vma=False,
        )(logits, *rest)

    return call


@lru_cache(maxsize=256)
def make_step(
    graphdef: nnx.GraphDef[Decoder],
    tree: WeightsTree,
    layout: KVLayout,
    bucket: Bucket,
    native: bool,
    mesh: Mesh | None = None,
) -> Step:
    """The step of one bucket, to be jitted with its state (argument 1) donated.

    The same one for the same arguments: JAX then knows what it has compiled, and a second
    engine of a process starts at once. Where the model is the last stage of several, it takes
    what comes from the one before, [T, D].

    Args:
        mesh: of several devices, over which weights and pages are laid out.
    """

    def step(weights, state, packed, x=None):
        model = nnx.merge(graphdef, tree.unflatten(weights))
        inputs = unpack(packed, bucket, layout.num_groups)
        batch = inputs.batches[0]
        num_slots = state.history.shape[0]
        token_slots = inputs.slots[batch.token_seqs]
        positions = inputs.positions
        remembered = state.history[token_slots, positions]
        tokens = jnp.where(inputs.tokens >= 0, inputs.tokens, remembered)
        # Rows past the end are dropped by the scatter: padding remembers nothing.
        write_slots = jnp.where(batch.is_token, token_slots, num_slots)
        history = state.history.at[write_slots, positions].set(tokens, mode="drop")
        context_lens = jnp.maximum(inputs.prompt_lens[batch.token_seqs], positions + 1)
        step_of = (list(state.pages), inputs.batches, layout.places)
        context = NativeContext(*step_of) if native else PagedContext(*step_of, mesh)
        where = (positions, context_lens, context)
        hidden = model.hidden(tokens, *where) if x is None else model.norm(model.run(x, *where))
        last = jnp.maximum(batch.query_starts[1:] - 1, 0)
        num_rows = jnp.sum(batch.kv_lens > 0, dtype=jnp.int32)[None]
        logits = model.logits(hidden[last], num_rows)
        state = DeviceState(pages=tuple(context.pages), history=history, bias=state.bias)
        return state, StepOutput(logits=logits, hidden=hidden)

    return step


@lru_cache(maxsize=64)
def make_sampler(S: int, max_logprobs: int, mesh: Mesh | None = None) -> Sampler:
    """The sampler of S rows, to be jitted with the history (argument 0) donated.

    The same one for the same arguments, as `make_step`'s.

    Args:
        mesh: of several devices, which may share the vocabulary.
    """
    choose = over_vocabulary(partial(sample, max_logprobs=max_logprobs), mesh)

    def sampler(history, bias, logits, packed, masks):
        rows, samples = unpack_rows(packed, S)
        sampled = choose(logits, rows, history, bias, masks)
        write_slots = jnp.where(samples, rows.slot, history.shape[0])
        history = history.at[write_slots, rows.kv_len].set(sampled.token_ids, mode="drop")
        return history, sampled

    return sampler
