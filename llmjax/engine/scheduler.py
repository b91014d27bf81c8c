"""Who runs in the next step, and what a finished step means. Pure Python, no jax.

`schedule` plans step n+1 while step n runs, so a plan counts on tokens that the host has not
seen (`Sequence.num_pending`); `commit` brings the results in, in the order of the plans.

The rules:

- Each step takes all running decodes, then prompts under way, then waiting ones, first come
  first served. A waiting sequence is admitted with pages for all of its tokens, so that only
  decodes ever ask for more.
- Arrivals of running sequences all precede those of waiting ones. On page shortage the
  youngest running sequence goes back to the head of the waiting ones and is recomputed later;
  so the oldest always goes on.
- A sequence that stops running (finished, aborted, preempted) keeps its pages and its slot
  until no step in flight includes it, and is not run again before that. A decode that needs
  pages which are on their way back this way sits out until they come.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator
from itertools import islice

from ..cache.block_pool import BlockPool
from ..config import SchedulerConfig
from ..errors import InvalidRequestError, QueueFullError
from ..request import FinishReason, Sequence, SequenceDelta, Status, TokenLogprobs, longest
from .buckets import Buckets, Piece
from .plan import Chunk, Plan
from .stopping import stop_at

MAX_RETRY_AFTER = 60


class Scheduler:
    """Sequences from their arrival to their last token.

    Args:
        block_size: tokens in a page of `pool`.
        max_model_len: most tokens of a sequence, prompt and output; `pool` holds as many, or
            a sequence alone could get stuck.

    Attributes:
        num_preemptions: times a sequence was preempted, so far.
        bucket_tokens, padded_tokens: tokens of all steps' buckets, and how many of these
            were padding.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        buckets: Buckets,
        pool: BlockPool,
        *,
        block_size: int,
        max_model_len: int,
    ):
        if pool.num_blocks * block_size < max_model_len:
            raise ValueError(
                f"{pool.num_blocks} pages of {block_size} tokens do not hold max_model_len "
                f"({max_model_len})"
            )
        self.config = config
        self.buckets = buckets
        self.pool = pool
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self.bucket_tokens = 0
        self.padded_tokens = 0
        # Ordered sets, by arrival; a deque or list would make leaving from the middle slow.
        self._running: dict[Sequence, None] = {}
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        # Stopped running while in flight; the preempted among them wait as well.
        self._leaving: dict[Sequence, None] = {}
        self._requests: dict[str, dict[int, Sequence]] = {}
        self._num_queued: Counter[str] = Counter()
        self._max_len: dict[Sequence, int] = {}
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[Plan] = deque()
        self._arrivals = 0
        self._num_promised = 0

    # What there is

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether anything runs, waits or is in flight. False: pages and slots are all free."""
        return bool(self._running or self._waiting or self._leaving)

    # Arrival and departure

    def add(self, seq: Sequence) -> None:
        """Puts a sequence behind the waiting ones.

        Raises:
            InvalidRequestError: it could never run: an empty prompt, more than
                `max_model_len`, or, without chunked prefill, a prompt beyond one step.
            QueueFullError: `max_queue_len` requests wait. The further sequences of a request
                whose first was taken are never refused for this.
        """
        request = seq.request
        siblings = self._requests.get(request.id, {})
        if seq.index in siblings:
            raise InvalidRequestError(
                f"request {request.id!r} is running already, allowed: an id of its own",
                param="request_id",
            )
        max_len = longest(seq.prompt_len, request.params.max_tokens, self.max_model_len)
        self._check_whole(seq)
        limit = self.config.max_queue_len
        if not siblings and limit is not None and len(self._num_queued) >= limit:
            # What the head of the queue has waited is about what the way through it takes.
            waited = time.monotonic() - next(iter(self._waiting)).request.arrival_time
            raise QueueFullError(
                f"{limit} requests wait already (max_queue_len)",
                retry_after=min(max(1, math.ceil(waited)), MAX_RETRY_AFTER),
            )
        self._arrivals += 1
        seq.arrival = self._arrivals
        seq.status = Status.WAITING
        self._max_len[seq] = max_len
        self._requests.setdefault(request.id, siblings)[seq.index] = seq
        self._waiting[seq] = None
        self._num_queued[request.id] += 1

    def _check_whole(self, seq: Sequence) -> None:
        most = self.buckets.max_tokens
        if not self.config.enable_chunked_prefill and seq.prompt_len > most:
            raise InvalidRequestError(
                f"the prompt has {seq.prompt_len} tokens, allowed: up to {most}, those of one "
                "step, as enable_chunked_prefill is off",
                param="prompt",
            )

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceDelta]:
        """Ends the request, or one of its choices, wherever it is; unknown ids are no error.

        Returns:
            The last delta of each sequence that this ended.
        """
        live = self._requests.get(request_id, {})
        ended = [seq for seq in live.values() if index is None or seq.index == index]
        deltas = []
        for seq in ended:
            self._finish(seq, FinishReason.ABORT)
            self._let_go(seq)
            deltas.append(
                SequenceDelta(request_id, seq.index, [], [], finish_reason=FinishReason.ABORT)
            )
        return deltas

    def _finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        if seq.status is Status.RUNNING:
            del self._running[seq]
        else:
            self._unqueue(seq)
        seq.status = Status.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        del self._max_len[seq]
        siblings = self._requests[seq.request.id]
        del siblings[seq.index]
        if not siblings:
            del self._requests[seq.request.id]

    def _unqueue(self, seq: Sequence) -> None:
        del self._waiting[seq]
        self._num_queued[seq.request.id] -= 1
        if not self._num_queued[seq.request.id]:
            del self._num_queued[seq.request.id]

    def _let_go(self, seq: Sequence) -> None:
        """Takes back what a sequence that does not run holds, once no step may write there."""
        if seq.in_flight:
            self._leaving[seq] = None
            return
        self._leaving.pop(seq, None)
        self.pool.free(seq.block_table)
        seq.block_table = []
        if seq.slot >= 0:
            self._free_slots.append(seq.slot)
            seq.slot = -1

    # Planning a step

    def schedule(self) -> Plan | None:
        """The next step, or None where nothing can run before a commit or a ready bucket."""
        self._num_promised = 0
        chunks, prefilling, is_decoding = self._decode_chunks()
        chunks += self._prefill_chunks(len(chunks), prefilling, is_decoding)
        if not chunks:
            return None
        tokens = sum(chunk.count for chunk in chunks)
        pages = self._pages(max(chunk.start + chunk.count for chunk in chunks))
        bucket = self.buckets.choose(tokens, len(chunks), tokens == len(chunks), pages)
        if bucket is None:
            raise RuntimeError(
                f"no ready bucket holds {tokens} tokens of {len(chunks)} sequences with "
                f"{pages} pages; ready: {self.buckets.ready}"
            )
        for chunk in chunks:
            seq = chunk.seq
            seq.in_flight += 1
            seq.num_computed = chunk.start + chunk.count
            seq.num_pending += chunk.samples
        self.bucket_tokens += bucket.tokens
        self.padded_tokens += bucket.tokens - tokens
        plan = Plan(chunks, bucket, tokens, pages)
        self._in_flight.append(plan)
        return plan

    def _decode_chunks(self) -> tuple[list[Chunk], list[Sequence], bool]:
        """Decodes that have a page, prompts under way, and whether any sequence decodes."""
        chunks: list[Chunk] = []
        prefilling: list[Sequence] = []
        is_decoding = False
        for seq in list(self._running):
            if seq.status is not Status.RUNNING:
                continue  # preempted just now for an older one
            known, start = seq.num_tokens, seq.num_computed
            if known == seq.prompt_len or known - start > 1:
                prefilling.append(seq)
            elif known < self._max_len[seq]:
                is_decoding = True
                if start < len(seq.block_table) * self.block_size or self._grow(seq):
                    chunks.append(Chunk(seq, start, 1, True))
        return chunks, prefilling, is_decoding

    def _grow(self, seq: Sequence) -> bool:
        """Gives a decode one more page, at the cost of the youngest; False: not in this step."""
        while (page := self.pool.allocate(1)) is None:
            if sum(len(s.block_table) for s in self._leaving) > self._num_promised:
                self._num_promised += 1
                return False
            victim = next(reversed(self._running))
            self._preempt(victim)
            if victim is seq:
                return False
        seq.block_table += page
        return True

    def _preempt(self, seq: Sequence) -> None:
        del self._running[seq]
        seq.status = Status.WAITING
        seq.num_computed = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[seq] = None
        self._waiting.move_to_end(seq, last=False)
        self._num_queued[seq.request.id] += 1
        self._let_go(seq)

    def _prefill_chunks(
        self, num_decodes: int, prefilling: list[Sequence], is_decoding: bool
    ) -> list[Chunk]:
        config = self.config
        limit = config.max_num_batched_tokens - num_decodes
        if is_decoding and config.enable_chunked_prefill:
            limit = min(limit, config.prefill_chunk_size)
        pieces = [self._piece(seq) for seq in prefilling]
        wanted = sum(piece.tokens for piece in pieces)
        for seq in self._admissible():
            if wanted >= limit:
                break
            prefilling.append(seq)
            pieces.append(self._piece(seq))
            wanted += pieces[-1].tokens
        chunks = []
        counts = self.buckets.fill(num_decodes, pieces, limit)
        for seq, count in zip(prefilling, counts, strict=False):
            if seq.status is Status.WAITING:
                self._admit(seq)
            start = seq.num_computed
            chunks.append(Chunk(seq, start, count, start + count == seq.num_tokens))
        return chunks

    def _piece(self, seq: Sequence) -> Piece:
        remaining = seq.num_tokens - seq.num_computed
        if self.config.enable_chunked_prefill:
            return Piece(min(remaining, self.config.prefill_chunk_size), whole=False)
        # What is recomputed may have outgrown the largest step, which its prompt did not.
        return Piece(remaining, whole=not seq.output_len)

    def _admissible(self) -> Iterator[Sequence]:
        """The waiting sequences that could start now, first come first served."""
        room = min(self.buckets.max_seqs - len(self._running), len(self._free_slots))
        free = self.pool.num_free
        reserve = self.config.watermark * self.pool.num_blocks if self._running else 0
        for seq in islice(self._waiting, max(room, 0)):
            free -= self._pages(len(seq.tokens))
            if seq.in_flight or free < reserve:
                return
            yield seq
            reserve = self.config.watermark * self.pool.num_blocks

    def _admit(self, seq: Sequence) -> None:
        pages = self.pool.allocate(self._pages(len(seq.tokens)))
        if pages is None:
            raise RuntimeError(f"admitted {seq.request.id!r} without the pages for it")
        self._unqueue(seq)
        seq.status = Status.RUNNING
        seq.block_table = pages
        seq.slot = self._free_slots.pop()
        self._running[seq] = None

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # Results of a step

    def commit(
        self,
        plan: Plan,
        token_ids: Collection[int | None],
        logprobs: list[TokenLogprobs | None] | None = None,
        prompt_logprobs: list[list[TokenLogprobs]] | None = None,
    ) -> list[SequenceDelta]:
        """Takes in what the oldest step in flight gave.

        Args:
            plan: that step.
            token_ids: for each chunk the token sampled; ignored where it does not sample.
            logprobs: of these tokens; None where not asked for.
            prompt_logprobs: for each chunk those of the prompt tokens that follow its
                positions, up to the last; empty where not asked for. They start behind the
                `seq.num_prompt_logprobs` that are known already, as they are not told twice
                where a sequence is recomputed.

        Returns:
            One delta for each sequence with news. Rows of sequences that had finished before
            are ignored.
        """
        if not self._in_flight or self._in_flight[0] is not plan:
            raise RuntimeError("a step was committed out of order")
        self._in_flight.popleft()
        rows = zip(
            plan.chunks,
            token_ids,
            logprobs or [None] * len(plan.chunks),
            prompt_logprobs or [[]] * len(plan.chunks),
            strict=True,
        )
        deltas = []
        for chunk, token, logprob, prompt in rows:
            seq = chunk.seq
            seq.in_flight -= 1
            seq.num_pending -= chunk.samples
            if seq.status is not Status.FINISHED:
                news = self._news(chunk, token, logprob, prompt)
                if news.token_ids or news.prompt_logprobs:
                    deltas.append(news)
            if seq.status is not Status.RUNNING:
                self._let_go(seq)
        return deltas

    def _news(
        self,
        chunk: Chunk,
        token: int | None,
        logprob: TokenLogprobs | None,
        prompt: list[TokenLogprobs],
    ) -> SequenceDelta:
        seq = chunk.seq
        seq.num_prompt_logprobs += len(prompt)
        if prompt and seq.num_prompt_logprobs > min(chunk.start + chunk.count, seq.prompt_len - 1):
            raise RuntimeError(f"prompt logprobs of {seq.request.id!r} are told twice")
        delta = SequenceDelta(seq.request.id, seq.index, [], [], prompt)
        if chunk.samples:
            if token is None:
                raise RuntimeError(f"no token for {seq.request.id!r}, whose chunk samples one")
            seq.tokens.append(token)
            delta.token_ids.append(token)
            if logprob is not None:
                delta.logprobs.append(logprob)
            if stop := stop_at(seq, self._max_len[seq]):
                self._finish(seq, *stop)
            delta.finish_reason, delta.stop_reason = seq.finish_reason, seq.stop_reason
        return delta

    def check_balance(self) -> None:
        """Compares every account with what the sequences hold; for tests and debugging.

        Raises:
            RuntimeError: an account is off; says which.
        """
        running, waiting = list(self._running), list(self._waiting)
        holders = [*running, *self._leaving]
        pages = [page for seq in holders for page in seq.block_table]
        slots = [seq.slot for seq in holders if seq.slot >= 0] + self._free_slots
        empty = [seq for seq in waiting if seq not in self._leaving]
        arrivals = [seq.arrival for seq in running + waiting]
        rows = Counter(chunk.seq for plan in self._in_flight for chunk in plan.chunks)
        live = [seq for choices in self._requests.values() for seq in choices.values()]
        size = self.block_size
        accounts = {
            "pages in use": self.pool.num_used == len(pages) == len(set(pages)),
            "slots": sorted(slots) == list(range(self.config.max_num_seqs)),
            "waiting without pages": not any(s.block_table or s.slot >= 0 for s in empty),
            "order of arrival": arrivals == sorted(arrivals),
            "rows in flight": all(s.in_flight == rows[s] for s in [*live, *holders, *rows]),
            "positions": all(s.num_computed <= len(s.block_table) * size for s in running),
            "live sequences": set(live) == {*running, *waiting} == set(self._max_len),
            "waiting requests": self._num_queued == Counter(s.request.id for s in waiting),
        }
        if wrong := [name for name, ok in accounts.items() if not ok]:
            raise RuntimeError(f"the scheduler's accounts are off: {', '.join(wrong)}")
