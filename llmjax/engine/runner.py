"""Runs plans on the device: packs, dispatches, and reads results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, Sharding
from jaxtyping import Array

from llmjax_kernels.kv_format import KVFormat
from llmjax_kernels.layout import PagedKV

from ..cache.layout import KVLayout
from ..cache.page_store import Condense, Move, Transfer
from ..checkpoint import LoadedModel
from ..config import EngineConfig
from ..parallel.group import Group
from ..request import TokenLogprobs
from ..sampling import BiasTable, SampledTokens, mask_words
from ..structured import Constraint, fill_masks
from .batch import BiasRow, SlotTable
from .buckets import Bucket, Buckets
from .compile import Programs, on_cpu
from .condense import Condenser
from .ends import EndTable
from .orders import Order, SampleOrder, StepOrder, Stop, digest, encode
from .page_mover import PageMover
from .pipeline import StageMovers, make_programs
from .plan import Chunk, Plan
from .prompt_logprobs import PromptScorer, row_logprobs
from .step import StepOutput, shardings_of


@dataclass
class InFlight:
    """A dispatched step whose results are still on the device.

    Attributes:
        output: None of several steps, which have been sampled with it.
        rows: what the sampler reads, packed.
        sampled: None until `Runner.sample`. Of several steps it has an axis of steps in front.
    """

    plan: Plan
    output: StepOutput | None
    rows: np.ndarray
    sampled: SampledTokens | None = None


@dataclass
class StepResult:
    """A finished step on the host, aligned with the plan's chunks.

    Attributes:
        token_ids: those sampled after each chunk, one a step (unspecified where it does not
            sample); `NO_TOKEN` where the row has ended before.
        logprobs: of these, where the request asked.
        prompt_logprobs: of the prompt tokens that follow the chunk's tokens, where asked.
    """

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    prompt_logprobs: list[list[TokenLogprobs]]


class Runner:
    """Owns the device's state and the compiled programs, the first of which it compiles.

    Args:
        max_model_len: tokens a sequence may reach.
        num_pages: of the pool, in each layer.
        model: the model, loaded.
        layout: which layers share pages.
        kv_format: what pages keep of a key or value.
        num_slots: pages of host memory.
        on_compiled: see `Programs`.
        group: the processes that run this together; all make a runner of their own, and those
            that do not lead follow (`follower.py`).
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        buckets: Buckets,
        *,
        layout: KVLayout,
        kv_format: KVFormat,
        max_model_len: int,
        num_pages: int,
        num_slots: int,
        on_compiled: Callable[[Bucket, float], None],
        group: Group | None = None,
    ):
        self.group = group
        self._digests: list[int] = []
        slots = config.scheduler.max_num_seqs
        programs = make_programs(
            model,
            layout,
            kv_format,
            slots=slots,
            max_model_len=max_model_len,
            max_logprobs=config.max_logprobs,
            num_steps=config.scheduler.num_scheduler_steps,
        )
        self._mask_words = mask_words(model.config.vocab_size)
        sizes = {bucket.seqs for bucket in buckets.all}
        self._layout = layout
        self._make_state = partial(programs.make_state, num_pages)
        self._weights: Any = programs.weights
        head, head_weights, tree = programs.head
        whole = head.place.sharding(PartitionSpec())
        self._no_masks = {S: zeros((S, self._mask_words), whole) for S in sizes}
        self._state_shapes = programs.state_shapes(num_pages)
        most_pages = max(bucket.pages for bucket in buckets.all)
        self.slots = SlotTable(
            slots,
            most_pages,
            layout.num_groups,
            layout.block_size,
            notes=group is not None and group.leads,
        )
        self._ends = EndTable(slots)
        self.programs = Programs(
            buckets, partial(programs.compile, num_pages=num_pages), on_compiled, group
        )
        # Filling gigabytes with zeros takes seconds, for which compiling need not wait.
        with ThreadPoolExecutor(1) as pool:
            state = pool.submit(self._make_state)
            self._set_bias = self._compile_set_bias()
            self._set_history = self._compile_set_history()
            pools, axis = self._state_shapes.pages, 1 if model.native else 0
            evicts = layout.eviction is not None
            movers = [
                PageMover(pools[cut], axis=axis, num_slots=num_slots, puts=evicts)
                for cut in programs.cuts
            ]
            # Who reads pages has one stage: the configuration sees to it.
            self._mover: Any = movers[0] if len(movers) == 1 else StageMovers(movers, programs.cuts)
            self.scorer = PromptScorer(head, head_weights, tree, config.max_logprobs, self._send)
            self._condenser = (
                Condenser(programs.parts, programs.cuts, num_pages) if evicts else None
            )
            self.programs.start(background=config.compile.background)
            self._state = state.result()

    def reset(self) -> None:
        """A state of zeros in place of one that a failed step may have taken with it."""
        self._mover.forget()
        del self._state  # or memory would have to hold two
        self._state = self._make_state()

    def dispatch(self, plan: Plan) -> InFlight:
        """Starts the model's part of a step, or all of several; returns before it has finished."""
        biases, histories = [], []
        for chunk in plan.admitted:
            self._ends.admit(chunk.seq)
            bias = self.slots.admit(chunk.seq)
            if bias is not None:
                biases.append((chunk.seq.slot, bias))
            if self._looks_back(chunk):
                histories.append((chunk.seq.slot, chunk.seq.tokens))
        packed = self.slots.pack(plan)
        order = StepOrder(biases, histories, plan.transfers, plan.bucket, packed)
        self._send(order)
        if plan.num_steps == 1:
            return InFlight(plan, self.execute(order), packed.rows)
        self._prepare(order)
        loop, ends = self.programs[plan.bucket].loop, self._ends.pack(plan)
        self._state, sampled = loop(self._weights, self._state, packed.step, packed.rows, ends)
        return InFlight(plan, None, packed.rows, sampled)

    def execute(self, order: StepOrder) -> StepOutput:
        """Starts what an order says; returns before it has finished."""
        self._prepare(order)
        program = self.programs[order.bucket].step
        self._state, output = program(self._weights, self._state, order.packed.step)
        return output

    def _prepare(self, order: StepOrder) -> None:
        """What an order says of the state before its step."""
        for slot, bias in order.biases:
            table = self._set_bias(self._state.bias, np.int32(slot), bias)
            self._state = replace(self._state, bias=table)
        for slot, tokens in order.histories:
            row = np.zeros(self._state_shapes.history.shape[1], np.int32)
            row[: len(tokens)] = tokens
            history = self._set_history(self._state.history, np.int32(slot), row)
            self._state = replace(self._state, history=history)
        if order.transfers:
            self._state = replace(self._state, pages=self._move(order.transfers))

    def sample(self, step: InFlight) -> None:
        """Starts the sampler on what `dispatch` gave, before the next step is dispatched.

        Every token that comes before those to be sampled is known by now.
        """
        assert step.output is not None
        order = self._order_sample(step.plan)
        self._send(order)
        step.sampled = self.choose(step.plan.bucket, step.output, step.rows, order)

    def choose(
        self, bucket: Bucket, output: StepOutput, rows: np.ndarray, order: SampleOrder
    ) -> SampledTokens:
        """Starts the sampler of a bucket; returns before it has finished."""
        masks: Array | np.ndarray = self._no_masks[bucket.seqs]  # on the device already
        if order.rows:
            masks = np.zeros(masks.shape, np.int32)
            masks[order.rows] = order.masks
        state = self._state
        args = (state.history, state.bias, output.logits, rows, masks)
        history, sampled = self.programs[bucket].sample(*args)
        self._state = replace(state, history=history)
        return sampled

    def _order_sample(self, plan: Plan) -> SampleOrder:
        """What each row's constraint allows next."""
        found = [
            (row, chunk.seq.constraint)
            for row, chunk in enumerate(plan.chunks)
            if chunk.samples and isinstance(chunk.seq.constraint, Constraint)
        ]
        masks = np.zeros((len(found), self._mask_words), np.int32)
        if found:
            # On a CPU the step that runs meanwhile has all processors.
            parallel = not on_cpu()
            rows = [(i, constraint) for i, (_, constraint) in enumerate(found)]
            fill_masks(masks, rows, parallel=parallel)
        return SampleOrder([row for row, _ in found], masks)

    def stop(self, reason: str = "") -> None:
        """Ends the processes that follow this one: all is done, or `reason` says what is not."""
        if self.group is not None and self.group.leads:
            self.group.send(encode(Stop(reason), self.slots, self._digests))
            self.group.leave()

    def page_arrays(self) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
        """Shape and dtype of what each pool keeps of a page."""
        return self._mover.arrays

    def read_pages(self, pages: Sequence[int]) -> list[Array]:
        """What pages hold after the steps dispatched so far; see `PageMover.read`."""
        return self._mover.read(self._state.pages, pages)

    def time_moves(self) -> tuple[float, float]:
        """Seconds that saving and loading a page take."""
        pages, seconds = self._mover.time(self._state.pages)
        self._state = replace(self._state, pages=pages)
        return seconds

    def collect(self, step: InFlight) -> StepResult:
        """Waits for a step and brings its results to the host."""
        assert step.sampled is not None
        sampled = self.settle(step.sampled)
        steps = [sampled]
        if step.output is None:
            steps = [SampledTokens(*arrays) for arrays in zip(*sampled, strict=True)]
        rows = zip(*(each.token_ids.tolist() for each in steps), strict=True)
        token_ids = [list(row) for row in islice(rows, len(step.plan.chunks))]
        logprobs: list[list[TokenLogprobs]] = []
        for row, chunk in enumerate(step.plan.chunks):
            wanted, scored = chunk.seq.request.params.logprobs, list[TokenLogprobs]()
            if wanted is not None:
                given = zip(steps[: chunk.samples], token_ids[row], strict=False)
                scored = [row_logprobs(each, row, token, wanted) for each, token in given]
            logprobs.append(scored)
        # Several steps are of decodes.
        prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in step.plan.chunks]
        if step.output is not None:
            prompt_logprobs = self.scorer.score_plan(step.plan, step.output)
        if self.group is not None:
            self._digests.append(digest(sampled.token_ids))
        return StepResult(token_ids, logprobs, prompt_logprobs)

    def settle(self, sampled: SampledTokens) -> SampledTokens:
        """Waits for a step, and for what it has saved; its tokens on the host."""
        sampled = jax.device_get(sampled)
        self._mover.settle()
        return sampled

    def _move(self, transfers: list[Transfer]) -> tuple[PagedKV, ...]:
        """The pages after the transfers, in order."""
        pages, moves = self._state.pages, list[Move]()
        for transfer in transfers:
            if not isinstance(transfer, Condense):
                moves.append(transfer)
                continue
            assert self._condenser is not None
            pages, moves = self._mover.run(pages, moves), []
            for ids, rows in self._condenser.run(pages, self._state.history, transfer):
                pages = self._mover.put(pages, ids, rows)
        return self._mover.run(pages, moves)

    def _looks_back(self, chunk: Chunk) -> bool:
        """Whether a sequence's history is wanted, of which steps remember what they compute."""
        eviction = self._layout.eviction
        selects = eviction is not None and eviction.selects
        return bool(chunk.start) and (chunk.seq.request.params.counts_tokens or selects)

    def _send(self, order: Order) -> None:
        if self.group is not None:
            self.group.send(encode(order, self.slots, self._digests))
            self._digests = []

    def _compile_set_bias(self) -> Any:
        def set_bias(table: BiasTable, slot: jax.Array, row: BiasRow) -> BiasTable:
            return BiasTable(
                ids=table.ids.at[slot].set(row.ids),
                values=table.values.at[slot].set(row.values),
                until=table.until.at[slot].set(row.until),
            )

        width = self._state_shapes.bias.ids.shape[1]
        ints = jax.ShapeDtypeStruct((width,), jnp.int32)
        row = BiasRow(ints, jax.ShapeDtypeStruct((width,), jnp.float32), ints)  # type: ignore[arg-type]
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        out = shardings_of(self._state_shapes.bias)
        jitted = jax.jit(set_bias, donate_argnums=0, out_shardings=out)
        return jitted.lower(self._state_shapes.bias, slot, row).compile()

    def _compile_set_history(self) -> Any:
        def set_history(history: Array, slot: Array, row: Array) -> Array:
            return history.at[slot].set(row)

        history = self._state_shapes.history
        row = jax.ShapeDtypeStruct(history.shape[1:], jnp.int32)
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        jitted = jax.jit(set_history, donate_argnums=0, out_shardings=history.sharding)
        return jitted.lower(history, slot, row).compile()


def zeros(shape: tuple[int, ...], whole: Sharding) -> Array:
    """int32, on every device."""
    return jax.make_array_from_callback(shape, whole, lambda _: np.zeros(shape, np.int32))
