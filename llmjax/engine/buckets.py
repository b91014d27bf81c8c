"""The static shapes that step programs are compiled for, and which of them is used when.

A program is named by its bucket (T, S, P): tokens in the step, sequences in the step, pages
of a sequence. Where T == S every sequence has exactly one token, which the program may rely
on (`Bucket.decode_only`); a mixed program has T > S.

Programs are compiled in the background, so what a step may hold follows from those that are
ready. A pair (T, S) is open once its program with the longest P is ready, so that any
sequence fits an open pair; programs with shorter P only make a step cheaper.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import groupby, product
from operator import itemgetter
from typing import NamedTuple

from ..config import CompileConfig, SchedulerConfig
from ..errors import ConfigError

MIXED_SEQS = (8, 64, 256)
"""Default S of mixed programs, below `max_num_seqs`; S stays below T, so a crowd in a small T
needs one between."""
SMALLEST_MIXED, MIXED_RATIO = 32, 4
"""Default T of mixed programs: 32, 128, 512, ..."""
FIRST_MIXED = 128
"""T of the first program compiled: holds a short chat turn and compiles fast."""


class Bucket(NamedTuple):
    """The static shape of one step program."""

    tokens: int
    seqs: int
    pages: int

    @property
    def decode_only(self) -> bool:
        """Every sequence has exactly one token."""
        return self.tokens == self.seqs


class Piece(NamedTuple):
    """Prompt tokens of one sequence that may go in a step; `whole` forbids to cut them."""

    tokens: int
    whole: bool


class _Ready(NamedTuple):
    """Ready buckets by size, and for each T of an open mixed pair its largest S."""

    buckets: tuple[Bucket, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()


class Buckets:
    """All buckets of an engine and the ready ones among them.

    `mark_ready` may be called from any thread; everything else reads one snapshot.

    Args:
        max_model_len: most tokens of a sequence.
        block_size: tokens in a page.
        step_tokens: tokens beyond which a larger step gains no speed on this device; no
            larger T is derived then, unless all sequences need it.

    Raises:
        ConfigError: buckets given in `compile_config` cannot hold what the scheduler allows.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        compile_config: CompileConfig,
        *,
        max_model_len: int,
        block_size: int,
        step_tokens: int | None = None,
    ):
        self.config = config
        self._decode_seqs = _decode_seqs(config, compile_config)
        self._mixed = _mixed_pairs(config, compile_config, max_model_len, step_tokens)
        self._pages = _pages(compile_config, -(-max_model_len // block_size))
        pairs = [(s, s) for s in self._decode_seqs] + self._mixed
        self.all = tuple(sorted(Bucket(t, s, p) for (t, s), p in product(pairs, self._pages)))
        self._ready = _Ready()
        self._lock = threading.Lock()

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step once every program is ready."""
        return min(self._mixed[-1][0], self.config.max_num_batched_tokens)

    @property
    def largest(self) -> Bucket:
        """The bucket that holds any step."""
        return Bucket(*self._mixed[-1], self._pages[-1])

    @property
    def largest_decode(self) -> Bucket:
        """The bucket that holds any step of decodes alone."""
        return Bucket(self._decode_seqs[-1], self._decode_seqs[-1], self._pages[-1])

    @property
    def max_seqs(self) -> int:
        """Sequences that can run with what is ready, so that a prefill fits beside decodes."""
        return max((seqs for _, seqs in self._ready.edges), default=0)

    @property
    def ready(self) -> tuple[Bucket, ...]:
        return self._ready.buckets

    def mark_ready(self, bucket: Bucket) -> None:
        """Lets steps use `bucket`'s program."""
        if bucket not in self.all:
            raise ValueError(f"{bucket} is not one of this engine's buckets")
        with self._lock:
            ready = tuple(sorted({*self._ready.buckets, bucket}))
            edges = {t: s for t, s, pages in ready if t > s and pages == self._pages[-1]}
            self._ready = _Ready(ready, tuple(edges.items()))

    def choose(
        self, num_tokens: int, num_seqs: int, decode_only: bool, num_pages: int
    ) -> Bucket | None:
        """The smallest ready bucket that holds a step, or None.

        Args:
            decode_only: every sequence of the step has exactly one token.
            num_pages: of the sequence with most.
        """
        for bucket in self._ready.buckets:
            fits = num_tokens <= bucket.tokens and num_seqs <= bucket.seqs
            if fits and num_pages <= bucket.pages and (decode_only or not bucket.decode_only):
                return bucket
        return None

    def fill(self, num_decodes: int, pieces: Sequence[Piece], limit: int) -> list[int]:
        """Prompt tokens to take from each piece, in order, beside `num_decodes` decodes.

        All that fits is taken, where that leaves at most `max_paddings` of the bucket empty
        or where several smaller steps would cost as much. Otherwise a smaller bucket is
        filled and the rest left to the next steps: 150 tokens go as 128 and 22 (in 128 and
        32) rather than in 512.

        Args:
            limit: most prompt tokens in the step.

        Returns:
            Counts of the leading pieces, none of them 0; empty where nothing fits.
        """
        options: list[tuple[int, int, list[int]]] = []
        for edge, seqs in self._ready.edges:
            if edge > num_decodes and seqs > num_decodes:
                counts = _take(pieces, min(edge - num_decodes, limit), seqs - num_decodes)
                options.append((edge, sum(counts), counts))
        most = max((tokens for _, tokens, _ in options), default=0)
        if not most:
            return []
        index = next(i for i, (_, tokens, _) in enumerate(options) if tokens == most)
        edge, _, counts = options[index]
        if self._is_dense(edge, num_decodes + most):
            return counts
        for smaller, tokens, fewer in reversed(options[:index]):
            if tokens and self._is_dense(smaller, num_decodes + tokens):
                steps, rest = divmod(most, tokens)
                last = next(e for e, _, _ in options if e >= num_decodes + rest) if rest else 0
                return fewer if steps * smaller + last < edge else counts
        return counts

    def _is_dense(self, edge: int, tokens: int) -> bool:
        return edge - tokens <= self.config.max_paddings * edge

    def compile_order(self) -> tuple[list[Bucket], list[Bucket]]:
        """Buckets to compile before the server answers, and those to compile behind it.

        First a small mixed program and the decodes of as many sequences: with these every
        request is served. Then concurrency as it grows: a lone user's decode, and for each S
        a full prefill chunk and the decode of that many. Then the decodes between, larger
        steps for bursts of prompts, and programs with shorter P.
        """
        whole = None if self.config.enable_chunked_prefill else self.max_tokens
        mixed_seqs = sorted({s for _, s in self._mixed})
        first = [
            self._smallest_mixed(whole or FIRST_MIXED, mixed_seqs[0]),
            self._smallest_decode(mixed_seqs[0]),
        ]
        order = [*first, self._smallest_decode(1)]
        for seqs in mixed_seqs:
            order.append(self._smallest_mixed(whole or self.config.prefill_chunk_size, seqs))
            order.append(self._smallest_decode(seqs))
        order += sorted(self.all, key=_need)
        order = list(dict.fromkeys(order))
        return order[: len(first)], order[len(first) :]

    def _smallest_mixed(self, tokens: int, seqs: int) -> Bucket:
        """With T >= `tokens` and S >= `seqs`, or else with the largest T."""
        pairs = [(t, s) for t, s in self._mixed if s >= seqs]
        pair = next((pair for pair in pairs if pair[0] >= tokens), pairs[-1])
        return Bucket(*pair, self._pages[-1])

    def _smallest_decode(self, seqs: int) -> Bucket:
        size = next(s for s in self._decode_seqs if s >= seqs)
        return Bucket(size, size, self._pages[-1])

    def table(self) -> str:
        """All buckets as text to print at start."""
        lines = [
            f"{len(self.all)} step programs (T tokens, S sequences, P pages of a sequence)",
            f"  decode  T = S: {_spaced(self._decode_seqs)}",
        ]
        lines += [
            f"  mixed   T {tokens}: S {_spaced(seqs for _, seqs in pairs)}"
            for tokens, pairs in groupby(self._mixed, key=itemgetter(0))
        ]
        return "\n".join([*lines, f"  each with P: {_spaced(self._pages)}"])


def _need(bucket: Bucket) -> tuple[int, bool, int, int]:
    """Sorts what is needed most to the front."""
    return -bucket.pages, not bucket.decode_only, -bucket.seqs, -bucket.tokens


def _take(pieces: Sequence[Piece], tokens: int, seqs: int) -> list[int]:
    """How much of each piece fits in `tokens` and `seqs`, first come first served."""
    counts: list[int] = []
    for piece in pieces[:seqs]:
        count = min(piece.tokens, tokens)
        if not count or (piece.whole and count < piece.tokens):
            break
        counts.append(count)
        tokens -= count
    return counts


def _decode_seqs(config: SchedulerConfig, compile_config: CompileConfig) -> list[int]:
    most = config.max_num_seqs
    if compile_config.seq_buckets is None:
        return [2**i for i in range((most - 1).bit_length())] + [most]
    values = sorted(compile_config.seq_buckets)
    if values[-1] != most:
        raise ConfigError(
            f"seq_buckets is {compile_config.seq_buckets}, allowed: the largest is "
            f"max_num_seqs ({most})"
        )
    return values


def _mixed_pairs(
    config: SchedulerConfig,
    compile_config: CompileConfig,
    max_model_len: int,
    step_tokens: int | None,
) -> list[tuple[int, int]]:
    """(T, S) of the mixed programs, ascending."""
    most = config.max_num_seqs
    all_seqs = [s for s in MIXED_SEQS if s < most] + [most]
    if compile_config.seq_buckets is not None:
        all_seqs = sorted(compile_config.seq_buckets)
    # The largest T goes with S = max_num_seqs, or a full house could not prefill.
    least, largest = most + 1, max(most + 1, config.max_num_batched_tokens)
    if compile_config.token_buckets is not None:
        values = sorted(compile_config.token_buckets)
        if not (all_seqs[0] < values[0] and least <= values[-1] <= largest):
            raise ConfigError(
                f"token_buckets is {compile_config.token_buckets}, allowed: values above "
                f"{all_seqs[0]} (the smallest S), the largest of them from {least} (above "
                f"max_num_seqs) to {largest} (max_num_batched_tokens)"
            )
        return [(t, s) for t, s in product(values, all_seqs) if s < t]
    # Tokens that one sequence can bring: no T is larger than what its S sequences can fill.
    share = max_model_len
    if config.enable_chunked_prefill:
        share = min(share, config.prefill_chunk_size)
    if step_tokens is not None and config.enable_chunked_prefill:
        largest = min(largest, step_tokens)
    largest = max(least, min(largest, share * most))
    values = [SMALLEST_MIXED]
    while values[-1] < largest:
        values.append(values[-1] * MIXED_RATIO)
    values = [t for t in values if t < largest] + [largest]
    return [(t, s) for t, s in product(values, all_seqs) if s < t and (s * share >= t or s == most)]


def _pages(compile_config: CompileConfig, max_pages: int) -> list[int]:
    if compile_config.page_buckets is None:
        return [max_pages]
    values = sorted(compile_config.page_buckets)
    if values[-1] < max_pages:
        raise ConfigError(
            f"page_buckets is {compile_config.page_buckets}, allowed: the largest holds "
            f"max_model_len ({max_pages} pages)"
        )
    return values


def _spaced(values: Iterable[int]) -> str:
    return " ".join(map(str, values))
