"""A model in stages, each with programs and pages of its own.

A step goes through them: what a stage computes is moved to the devices of the next. The host
sends all of it off at once; devices take it up as it comes. The last stage has the head, the
sampler and what they need of each sequence (`DeviceState`), so that all but the last know no more
of a step than its tokens and pages. Steps in flight are in different stages, so no two may need
each other's tokens: see `Scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from llmjax_kernels.kv_format import KVFormat
from llmjax_kernels.layout import PagedKV

from ..cache.layout import KVLayout
from ..cache.page_store import Move
from ..checkpoint import LoadedModel
from ..models import Stage
from ..nn.attention import PagedContext
from .batch import packed_size, unpack
from .buckets import Bucket
from .decode_loop import LoopPrograms
from .page_mover import PageMover, Pools
from .step import (
    DeviceState,
    Program,
    StepOutput,
    StepPrograms,
    WeightsTree,
    shapes_of,
    shardings_of,
    temporaries_of,
)

Options = dict[str, int]


def make_programs(
    model: LoadedModel, layout: KVLayout, kv_format: KVFormat, *, num_steps: int = 1, **options: int
) -> StepPrograms | PipelinePrograms:
    """Of a model in one piece, or in stages; `options` are those of `StepPrograms`.

    Args:
        num_steps: that one program of decodes computes at most; 1 where there are stages.
    """
    if num_steps > 1:
        return LoopPrograms(model, layout, kv_format, num_steps=num_steps, **options)
    kind = PipelinePrograms if model.stages else StepPrograms
    return kind(model, layout, kv_format, **options)


def stage_layouts(model: LoadedModel, layout: KVLayout) -> list[KVLayout]:
    """What each stage of a model keeps of a page."""
    if not model.stages:
        return [layout]
    return [layout.stage(stage.layers) for stage in model.stages if stage.layers is not None]


class PipelinePrograms:
    """Compiles the steps of a model in stages, as `StepPrograms` does.

    A state's pages are those of all stages, in their order.

    Attributes:
        parts: the programs of each stage.
    """

    def __init__(self, model: LoadedModel, layout: KVLayout, kv_format: KVFormat, **options: int):
        layouts = stage_layouts(model, layout)
        self.parts = [
            StepPrograms(stage, kept, kv_format, **options)
            for stage, kept in zip(model.stages, layouts, strict=True)
        ]
        ends = accumulate((kept.layers_per_page for kept in layouts), initial=0)
        self.cuts = [slice(a, b) for a, b in pairwise(ends)]
        self.weights = [stage.weights for stage in self.parts]

    @property
    def head(self) -> tuple[LoadedModel, list[Array], WeightsTree]:
        """The stage that gives logits, and its weights."""
        return self.parts[-1].head

    def make_state(self, num_pages: int) -> DeviceState:
        """A state of zeros."""
        return _joined([stage.make_state(num_pages) for stage in self.parts])

    def state_shapes(self, num_pages: int) -> DeviceState:
        """The shapes of a state's arrays, and how they are laid out over devices."""
        return _joined([stage.state_shapes(num_pages) for stage in self.parts])

    def compile(self, bucket: Bucket, num_pages: int) -> Program:
        """The program of a bucket."""
        programs, hidden, x = [], [], None
        for number in range(len(self.parts) - 1):
            program, out = self._compile_stage(number, bucket, num_pages, x)
            sharding = self.parts[number + 1].model.place.sharding(PartitionSpec())
            x = jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=sharding)
            programs.append(program)
            hidden.append(sharding)
        last = self.parts[-1].compile(bucket, num_pages, x)
        return Program(Pipeline([*programs, last.step], self.cuts, hidden), last.sample)

    def temporaries(self, bucket: Bucket, num_pages: int) -> int:
        """Bytes that a step of this bucket takes in the stage where it takes most."""
        both = self.compile(bucket, num_pages)
        return max(temporaries_of(Program(p, both.sample)) for p in both.step.programs)

    def _compile_stage(
        self, number: int, bucket: Bucket, num_pages: int, x: jax.ShapeDtypeStruct | None
    ) -> tuple[Any, jax.ShapeDtypeStruct]:
        """A stage that is not the last: `stage(weights, pages, packed, x) -> (pages, x)`."""
        stage = self.parts[number]
        model, layout = stage.model, stage.layout
        function = make_stage(model.graphdef, stage.tree, layout, bucket, model.mesh)
        packed = jax.ShapeDtypeStruct((packed_size(bucket, layout.num_groups),), jnp.int32)
        pages = stage.state_shapes(num_pages).pages
        whole = model.place.sharding(PartitionSpec())
        jitted = jax.jit(function, donate_argnums=1, out_shardings=(shardings_of(pages), whole))
        given = () if x is None else (x,)
        lowered = jitted.lower(shapes_of(stage.weights), pages, packed, *given)
        return lowered.compile(), lowered.out_info[1]


@lru_cache(maxsize=256)
def make_stage(
    graphdef: nnx.GraphDef[Stage],
    tree: WeightsTree,
    layout: KVLayout,
    bucket: Bucket,
    mesh: Mesh | None,
) -> Callable[..., tuple[Pools, Array]]:
    """The layers of a stage, to be jitted with its pages (argument 1) donated.

    The first stage embeds tokens, which are all known to the host; others take what comes from
    the one before, [T, D]. The same one for the same arguments, as `make_step`'s.
    """

    def stage(weights, pages, packed, x=None):
        decoder = nnx.merge(graphdef, tree.unflatten(weights))
        inputs = unpack(packed, bucket, layout.num_groups)
        batch, positions = inputs.batches[0], inputs.positions
        context_lens = jnp.maximum(inputs.prompt_lens[batch.token_seqs], positions + 1)
        context = PagedContext(list(pages), inputs.batches, layout.places, mesh)
        if x is None:
            x = decoder.embed_tokens(inputs.tokens)
        x = decoder.run(x, positions, context_lens, context)
        return tuple(context.pages), x

    return stage


class Pipeline:
    """A step's programs, which are called like one.

    Args:
        cuts: where the pools of each stage are among the state's pages.
        hidden: where what a stage computes is to be for the next.

    Attributes:
        programs: one a stage.
    """

    def __init__(self, programs: list[Any], cuts: list[slice], hidden: list[Any]):
        self.programs = programs
        self._cuts = cuts
        self._hidden = hidden

    def __call__(
        self, weights: Sequence[list[Array]], state: DeviceState, packed: Any
    ) -> tuple[DeviceState, StepOutput]:
        """Sends a step through the stages; the state is donated. Waits for nothing."""
        pages: list[PagedKV] = []
        given: tuple[Array, ...] = ()
        for number, sharding in enumerate(self._hidden):
            kept = state.pages[self._cuts[number]]
            kept, x = self.programs[number](weights[number], kept, packed, *given)
            pages += kept
            given = (jax.device_put(x, sharding),)
        last = replace(state, pages=state.pages[self._cuts[-1]])
        last, output = self.programs[-1](weights[-1], last, packed, *given)
        return replace(last, pages=(*pages, *last.pages)), output


class StageMovers:
    """Moves pages in every stage, as `PageMover` does in one.

    Args:
        cuts: where the pools of each stage are among all.
    """

    def __init__(self, movers: Sequence[PageMover], cuts: Sequence[slice]):
        self._movers, self._cuts = movers, cuts

    def run(self, pools: Pools, transfers: Iterable[Move]) -> Pools:
        """The pools after the transfers; the given ones are donated."""
        moves = list(transfers)
        each = zip(self._movers, self._cuts, strict=True)
        return tuple(chain.from_iterable(mover.run(pools[cut], moves) for mover, cut in each))

    def time(self, pools: Pools) -> tuple[Pools, tuple[float, float]]:
        """The pools as they were, and the seconds that saving and loading a page take."""
        each = zip(self._movers, self._cuts, strict=True)
        found = [mover.time(pools[cut]) for mover, cut in each]
        saving, loading = zip(*(seconds for _, seconds in found), strict=True)
        pools = tuple(chain.from_iterable(part for part, _ in found))
        return pools, (sum(saving), sum(loading))

    def put(self, pools: Pools, pages: list[int], rows: list[Array]) -> Pools:
        """The pools with other contents in some pages; see `PageMover.put`.

        Args:
            rows: of each array of all pools.
        """
        left, changed = iter(rows), list[PagedKV]()
        for mover, cut in zip(self._movers, self._cuts, strict=True):
            own = list(islice(left, len(jax.tree.leaves(pools[cut]))))
            changed += mover.put(pools[cut], pages, own)
        return tuple(changed)

    def settle(self) -> None:
        """Takes in what has been saved."""
        for mover in self._movers:
            mover.settle()

    def forget(self) -> None:
        """What has been saved and not taken in will not be wanted back."""
        for mover in self._movers:
            mover.forget()


def _joined(stages: list[DeviceState]) -> DeviceState:
    """The last stage's state, with the pages of all."""
    pages = tuple(chain.from_iterable(stage.pages for stage in stages))
    return replace(stages[-1], pages=pages)
