"""A step's host data as two int32 arrays, for the model and for the sampler: one layout for both
sides.

The host writes each sequence's sampling parameters once, into the row of its slot, and
gathers rows into the packed array each step; the device slices the arrays apart again.
float32 values travel as their bits.

Where several processes run the step, each has such a table: what the leader writes into its own
goes to the others as `Writes`, so that they gather the same rows and no page is told twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from llmjax_kernels.layout import RaggedBatch, make_ragged_batch

from ..cache.way import resident_pages
from ..request import MAX_LOGIT_BIAS, Sequence
from ..sampling import SamplingRows
from .buckets import Bucket
from .plan import Plan

NEVER = 2**31 - 1
_INTS = ("prompt_len", "seed_low", "seed_high", "top_k", "num_bias", "num_logprobs", "masked")
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_FIELDS = _INTS + _FLOATS
_GATHERED = ("prompt_lens", "block_tables", "parameters")


class StepInputs(NamedTuple):
    """What the model reads of a packed step.

    Attributes:
        tokens: input ids; -1 where the device's history knows the token (decodes whose
            input is still being sampled when the step is packed).
        positions: in the sequence; those in `batches` are among what is not evicted of it.
        batches: for each group of layers; they differ in their block tables.
        slots: each row's place in the history; past its end for padding.
        prompt_lens: tokens of each row's prompt.
    """

    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]
    batches: tuple[RaggedBatch, ...]
    slots: Int[Array, " S"]
    prompt_lens: Int[Array, " S"]


class PackedStep(NamedTuple):
    """A plan as the device takes it: for the model (`unpack`), for the sampler (`unpack_rows`)."""

    step: Int[np.ndarray, " step"]
    rows: Int[np.ndarray, " rows"]


class BiasRow(NamedTuple):
    """One sequence's entries of the device's bias table, padded to MAX_LOGIT_BIAS."""

    ids: Int[np.ndarray, " B"]
    values: Float[np.ndarray, " B"]
    until: Int[np.ndarray, " B"]


class Writes(NamedTuple):
    """What has changed in a slot table.

    Attributes:
        rows: of each slot that a sequence began to run in, its number and its row.
        pages: of each block table that grew, the group, slot, place and number of the new pages,
            and these.
    """

    rows: Int[np.ndarray, "n row_size"]
    pages: Int[np.ndarray, " m"]


class SlotTable:
    """Sampling parameters and block tables of the running sequences, by slot.

    Args:
        max_pages: of the widest bucket.
        num_groups: of layers, each with a block table.
        block_size: tokens in a page.
        notes: keep what is written, for `take_writes`.
    """

    def __init__(
        self,
        num_slots: int,
        max_pages: int,
        num_groups: int,
        block_size: int,
        notes: bool = False,
    ):
        self._notes = notes
        self._written_rows: list[np.ndarray] = []
        self._written_pages: list[int] = []
        self.num_slots = num_slots
        self.num_groups = num_groups
        self.block_size = block_size
        # The row past the last slot is padding: greedy, neutral penalties, no logprobs.
        self._rows = np.zeros((len(_FIELDS), num_slots + 1), np.int32)
        self._rows[_FIELDS.index("num_logprobs")] = -1
        for name in ("top_p", "repetition_penalty"):
            self._rows[_FIELDS.index(name)] = np.float32(1).view(np.int32)
        self._block_tables = np.zeros((num_groups, num_slots + 1, max_pages), np.int32)
        # Of each slot: pages written there, and the sequence's `num_dropped` at that time.
        self._num_blocks = [[0] * num_groups for _ in range(num_slots)]
        self._dropped = [0] * num_slots

    def admit(self, seq: Sequence) -> BiasRow | None:
        """Writes a sequence's row; returns its bias entries where it has any."""
        p, slot = seq.request.params, seq.slot
        bias = _bias_row(seq)
        seed = seq.seed & (2**64 - 1)
        values: dict[str, float] = {
            "prompt_len": seq.prompt_len,
            "seed_low": seed & 0xFFFFFFFF,
            "seed_high": seed >> 32,
            "top_k": p.top_k,
            "num_bias": 0 if bias is None else int(np.count_nonzero(bias.until)),
            "num_logprobs": -1 if p.logprobs is None else p.logprobs,
            "masked": seq.constraint is not None,
            "temperature": 0.0 if p.greedy else p.temperature,
            "top_p": p.top_p,
            "min_p": p.min_p,
            "repetition_penalty": p.repetition_penalty,
            "presence_penalty": p.presence_penalty,
            "frequency_penalty": p.frequency_penalty,
        }
        for i, name in enumerate(_INTS):
            self._rows[i, slot] = np.uint32(values[name] % 2**32).view(np.int32)
        for i, name in enumerate(_FLOATS):
            self._rows[len(_INTS) + i, slot] = np.float32(values[name]).view(np.int32)
        self._num_blocks[slot], self._dropped[slot] = [0] * self.num_groups, 0
        if self._notes:
            self._written_rows.append(np.array([slot, *self._rows[:, slot]]))
        return bias

    def pack(self, plan: Plan) -> PackedStep:
        """A plan's step; where it has several, the first of them."""
        S, chunks = plan.bucket.seqs, plan.chunks
        packed = np.zeros(packed_size(plan.bucket, self.num_groups), np.int32)
        fields = _split(packed, _layout(plan.bucket, self.num_groups))
        counts = np.fromiter((c.width for c in chunks), np.int32, len(chunks))
        ends = np.cumsum(counts)
        fields["query_starts"][1 : len(chunks) + 1] = ends
        fields["query_starts"][len(chunks) + 1 :] = ends[-1]
        fields["slots"][:] = [c.seq.slot for c in chunks] + [self.num_slots] * (S - len(chunks))
        fields["kv_lens"][: len(chunks)] = [c.kv_len - c.count + c.width for c in chunks]
        fields["dropped"][: len(chunks)] = [c.dropped for c in chunks]
        tokens, at = fields["tokens"], 0
        for c in chunks:
            known = c.seq.tokens[c.start : c.start + c.width]
            tokens[at : at + len(known)] = known
            tokens[at + len(known) : at + c.width] = -1
            at += c.width
            self._extend_block_tables(c.seq)
        rows = np.zeros(rows_size(S), np.int32)
        of_rows = _split(rows, _row_layout(S))
        of_rows["slots"][:] = fields["slots"]
        of_rows["positions"][: len(chunks)] = [c.start + c.width for c in chunks]
        of_rows["samples"][: len(chunks)] = [c.samples > 0 for c in chunks]
        return self._gather(PackedStep(packed, rows), plan.bucket)

    @property
    def row_size(self) -> int:
        """Values of a row of `Writes.rows`."""
        return 1 + len(_FIELDS)

    def take_writes(self) -> Writes:
        """What was written since this was asked last."""
        rows = np.array(self._written_rows, np.int32).reshape(-1, self.row_size)
        pages = np.array(self._written_pages, np.int32)
        self._written_rows, self._written_pages = [], []
        return Writes(rows, pages)

    def repack(self, bucket: Bucket, heads: PackedStep, writes: Writes) -> PackedStep:
        """What `pack` gave in the leader, from the first `head_sizes` values of it."""
        for row in writes.rows:
            self._rows[:, row[0]] = row[1:]
        at = 0
        while at < len(writes.pages):
            group, slot, place, count = writes.pages[at : at + 4]
            pages = writes.pages[at + 4 : at + 4 + count]
            self._block_tables[group, slot, place : place + count] = pages
            at += 4 + count
        sizes = packed_size(bucket, self.num_groups), rows_size(bucket.seqs)
        packed = PackedStep(*(np.zeros(size, np.int32) for size in sizes))
        for part, head in zip(packed, heads, strict=True):
            part[: len(head)] = head
        return self._gather(packed, bucket)

    def _gather(self, packed: PackedStep, bucket: Bucket) -> PackedStep:
        """With the parameters and block tables of the slots that the step names."""
        _, S, P = bucket
        fields = _split(packed.step, _layout(bucket, self.num_groups))
        of_rows = _split(packed.rows, _row_layout(S))
        slots = fields["slots"]
        parameters = self._rows[:, slots]
        fields["prompt_lens"][:] = parameters[_FIELDS.index("prompt_len")]
        fields["block_tables"].reshape(-1, S, P)[:] = self._block_tables[:, slots, :P]
        of_rows["parameters"].reshape(parameters.shape)[:] = parameters
        return packed

    def _extend_block_tables(self, seq: Sequence) -> None:
        slot = seq.slot
        if self._dropped[slot] != seq.num_dropped:
            self._dropped[slot], self._num_blocks[slot] = seq.num_dropped, [0] * self.num_groups
        known, gone = self._num_blocks[slot], seq.num_dropped // self.block_size
        for group, table in enumerate(seq.block_tables):
            have, count = known[group], len(table) - gone
            if have != count:
                # What lies behind a window is not read; any page will do.
                new = [max(page, 0) for page in resident_pages(seq, group, self.block_size, have)]
                self._block_tables[group, slot, have:count] = new
                known[group] = count
                if self._notes:
                    self._written_pages += [group, slot, have, len(new), *new]


def packed_size(bucket: Bucket, num_groups: int) -> int:
    return sum(size for _, size in _layout(bucket, num_groups))


def rows_size(S: int) -> int:
    return sum(size for _, size in _row_layout(S))


def head_sizes(bucket: Bucket, num_groups: int) -> tuple[int, int]:
    """Values of a packed step, for the model and for the sampler, that no slot table has: they
    come first."""
    layouts = _layout(bucket, num_groups), _row_layout(bucket.seqs)
    model, sampler = (
        sum(size for name, size in layout if name not in _GATHERED) for layout in layouts
    )
    return model, sampler


def unpack(packed: Int[Array, " step"], bucket: Bucket, num_groups: int) -> StepInputs:
    """Slices what the model reads apart, on the device."""
    T, S, P = bucket
    f = _split(packed, _layout(bucket, num_groups))
    tables = f["block_tables"].reshape(num_groups, S, P)
    batch = make_ragged_batch(
        f["query_starts"], f["kv_lens"], tables[0], T, decode_only=bucket.decode_only
    )
    batches = tuple(replace(batch, block_tables=table) for table in tables)
    positions = batch.positions + f["dropped"][batch.token_seqs]
    return StepInputs(f["tokens"], positions, batches, f["slots"], f["prompt_lens"])


def unpack_rows(packed: Int[Array, " rows"], S: int) -> tuple[SamplingRows, Bool[Array, " S"]]:
    """Slices what the sampler reads apart, on the device.

    Returns:
        Each row's parameters, and whether its logits give the sequence's next token.
    """
    f = _split(packed, _row_layout(S))
    row = dict(zip(_FIELDS, f["parameters"].reshape(len(_FIELDS), S), strict=True))
    floats = {name: lax.bitcast_convert_type(row[name], jnp.float32) for name in _FLOATS}
    seed = lax.bitcast_convert_type(jnp.stack([row["seed_high"], row["seed_low"]], -1), jnp.uint32)
    samples = f["samples"] > 0
    rows = SamplingRows(
        **floats,
        top_k=row["top_k"],
        seed=seed,
        position=f["positions"],
        prompt_len=row["prompt_len"],
        kv_len=f["positions"],
        slot=f["slots"],
        num_bias=row["num_bias"],
        num_logprobs=row["num_logprobs"],
        masked=samples & (row["masked"] > 0),
    )
    return rows, samples


def go_on(
    packed: Int[Array, " step"],
    rows: Int[Array, " rows"],
    bucket: Bucket,
    num_groups: int,
    tokens: Int[Array, " S"],
    moved: Int[Array, " S"],
    samples: Bool[Array, " S"],
) -> tuple[Int[Array, " step"], Int[Array, " rows"]]:
    """A step of decodes that follows the one given, on the device.

    Args:
        tokens: that each row computes, `moved` positions behind the one given.
        samples: rows of which the next token is wanted.
    """
    f, r = _split(packed, _layout(bucket, num_groups)), _split(rows, _row_layout(bucket.seqs))
    f |= {"tokens": tokens, "kv_lens": f["kv_lens"] + moved}
    r |= {"positions": r["positions"] + moved, "samples": samples.astype(jnp.int32)}
    return jnp.concatenate([*f.values()]), jnp.concatenate([*r.values()])


def _layout(bucket: Bucket, num_groups: int) -> tuple[tuple[str, int], ...]:
    T, S, P = bucket
    return (
        ("tokens", T),
        ("query_starts", S + 1),
        ("kv_lens", S),
        ("dropped", S),
        ("slots", S),
        ("prompt_lens", S),
        ("block_tables", num_groups * S * P),
    )


def _row_layout(S: int) -> tuple[tuple[str, int], ...]:
    return ("slots", S), ("positions", S), ("samples", S), ("parameters", len(_FIELDS) * S)


def _split(packed, layout: tuple[tuple[str, int], ...]) -> dict:
    fields, at = {}, 0
    for name, size in layout:
        fields[name] = packed[at : at + size]
        at += size
    return fields


def _bias_row(seq: Sequence) -> BiasRow | None:
    p = seq.request.params
    entries = [(i, v, NEVER) for i, v in (p.logit_bias or {}).items()]
    if p.min_tokens:
        held = set(p.stop_token_ids or ())
        held |= set() if p.ignore_eos else seq.request.eos_token_ids
        entries += [(i, -np.inf, p.min_tokens) for i in sorted(held)]
    if not entries:
        return None
    ids, values, until = zip(*entries, strict=True)
    pad = (0, MAX_LOGIT_BIAS - len(entries))
    return BiasRow(
        np.pad(np.array(ids, np.int32), pad),
        np.pad(np.array(values, np.float32), pad),
        np.pad(np.array(until, np.int32), pad),
    )
