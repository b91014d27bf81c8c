"""Who runs in the next step, and what a finished step means. Pure Python, no jax.

`schedule` plans step n+1 while step n runs, so a plan counts on tokens that the host has not
seen (`Sequence.num_pending`); `commit` brings the results in, in the order of the plans.

The rules:

- Each step takes all running decodes, then prompts under way, then waiting ones in the order
  of the policy. A waiting sequence is admitted with pages for all of its tokens (of a window,
  for those it starts with), so that hardly anything but decodes ever asks for more. What the
  cache remembers of them is not computed again; one whose beginning another sequence is about
  to compute waits for that.
- On page shortage a running sequence of the least priority goes back to the waiting ones: none
  that ranks before the one in need, and of the others one that loses least work. So the first
  in rank always goes on. What a preempted sequence has computed stays in the cache for as long
  as there is room.
- A sequence that stops running (finished, aborted, preempted) keeps its pages and its slot
  until no step in flight includes it, and is not run again before that. One that needs pages
  which are on their way back this way sits out until they come.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator
from heapq import merge

from ..cache.balance import check_balance
from ..cache.manager import KVCache, Match
from ..config import SchedulerConfig
from ..errors import InvalidRequestError, QueueFullError
from ..request import FinishReason, Sequence, SequenceDelta, Status, TokenLogprobs, longest
from .buckets import Buckets, Piece
from .plan import Chunk, Plan
from .stopping import stop_at
from .waiting import WaitingQueue

MOST_LOOKED_AT = 64
"""Waiting sequences that a step considers."""
MAX_RETRY_AFTER = 60


class Scheduler:
    """Sequences from their arrival to their last token.

    Args:
        cache: hands out the pages.
        max_model_len: most tokens of a sequence, prompt and output; the pool holds as many,
            or a sequence alone could get stuck.

    Attributes:
        num_preemptions: times a sequence was preempted, so far.
        bucket_tokens, padded_tokens: tokens of all steps' buckets, and how many of these
            were padding.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        buckets: Buckets,
        cache: KVCache,
        *,
        max_model_len: int,
    ):
        pages = cache.layout.most_pages(max_model_len, cache.chunk)
        if cache.pool.num_blocks < pages:
            raise ValueError(
                f"{cache.pool.num_blocks} pages do not hold max_model_len ({max_model_len}), "
                f"which takes {pages}"
            )
        self.config = config
        self.buckets = buckets
        self.cache = cache
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self.bucket_tokens = 0
        self.padded_tokens = 0
        self._running: dict[Sequence, None] = {}
        self._waiting = WaitingQueue(by_priority=config.scheduling_policy == "priority")
        # Stopped running while in flight; the preempted among them wait as well.
        self._leaving: dict[Sequence, None] = {}
        # Running, and no step has been told yet what is in their slot.
        self._fresh: set[Sequence] = set()
        self._requests: dict[str, dict[int, Sequence]] = {}
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
    def running(self) -> list[Sequence]:
        """In the order in which they began."""
        return list(self._running)

    def first_waiting(self, count: int) -> list[Sequence]:
        """Those to be considered first."""
        return self._waiting.first(count)

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
        if not siblings and limit is not None and self._waiting.num_requests >= limit:
            # What the head of the queue has waited is about what the way through it takes.
            waited = time.monotonic() - self._waiting.first(1)[0].request.arrival_time
            raise QueueFullError(
                f"{limit} requests wait already (max_queue_len)",
                retry_after=min(max(1, math.ceil(waited)), MAX_RETRY_AFTER),
            )
        self._arrivals += 1
        seq.arrival = self._arrivals
        seq.status = Status.WAITING
        self._max_len[seq] = max_len
        self._requests.setdefault(request.id, siblings)[seq.index] = seq
        self._waiting.add(seq)

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
            self._waiting.remove(seq)
        seq.status = Status.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        del self._max_len[seq]
        siblings = self._requests[seq.request.id]
        del siblings[seq.index]
        if not siblings:
            del self._requests[seq.request.id]

    def _let_go(self, seq: Sequence) -> None:
        """Takes back what a sequence that does not run holds, once no step may write there."""
        if seq.in_flight:
            self._leaving[seq] = None
            return
        self._leaving.pop(seq, None)
        self._fresh.discard(seq)
        has_ended = seq.status is Status.FINISHED
        self.cache.release(seq, wants_back=not has_ended)
        if seq.slot >= 0:
            self._free_slots.append(seq.slot)
            seq.slot = -1
        if has_ended:
            request = seq.request.id
            is_last = request not in self._requests and not any(
                other.request.id == request for other in self._leaving
            )
            self.cache.forget(seq, is_last=is_last)
        else:
            seq.num_computed = 0

    # Planning a step

    def schedule(self) -> Plan | None:
        """The next step, or None where nothing can run before a commit or a ready bucket."""
        self._num_promised = 0
        self._make_way()
        chunks, prefilling, is_decoding = self._decode_chunks()
        more = self._prefill_chunks(len(chunks), prefilling, is_decoding)
        # A prompt that needed pages may have preempted who was to decode.
        chunks = [chunk for chunk in chunks + more if chunk.seq.status is Status.RUNNING]
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
            self.cache.advance(seq)
        self.bucket_tokens += bucket.tokens
        self.padded_tokens += bucket.tokens - tokens
        admitted = [chunk for chunk in chunks if chunk.seq in self._fresh]
        self._fresh.difference_update(chunk.seq for chunk in admitted)
        transfers = self.cache.take_transfers()
        plan = Plan(chunks, bucket, tokens, pages, admitted, transfers)
        self._in_flight.append(plan)
        return plan

    def _make_way(self) -> None:
        """Preempts what a waiting sequence of higher priority needs to run."""
        if self.config.scheduling_policy != "priority" or not len(self._waiting):
            return
        head = self._waiting.first(1)[0]
        while any(s.request.priority > head.request.priority for s in self._running):
            seats = min(
                self.buckets.max_seqs - len(self._running),
                len(self._free_slots) + sum(s.slot >= 0 for s in self._leaving),
            )
            pages = self.cache.num_available + sum(map(self.cache.num_held, self._leaving))
            if seats > 0 and self.cache.needed(head, self.cache.match(head)) <= pages:
                return
            self._preempt(self._victim(head))

    def _decode_chunks(self) -> tuple[list[Chunk], list[Sequence], bool]:
        """Decodes that have a page, prompts under way, and whether any sequence decodes."""
        chunks: list[Chunk] = []
        prefilling: list[Sequence] = []
        is_decoding = False
        for seq in sorted(self._running, key=self._waiting.rank):
            if seq.status is not Status.RUNNING:
                continue  # preempted just now for one that ranks before it
            known, start = seq.num_tokens, seq.num_computed
            if known == seq.prompt_len or known - start > 1:
                prefilling.append(seq)
            elif known < self._max_len[seq]:
                is_decoding = True
                if self._extend(seq, start, 1):
                    chunks.append(Chunk(seq, start, 1, True))
        prefilling = [seq for seq in prefilling if seq.status is Status.RUNNING]
        return chunks, prefilling, is_decoding

    def _extend(self, seq: Sequence, start: int, count: int) -> bool:
        """Pages for the next positions, at the cost of others; False: not in this step."""
        while not self.cache.extend(seq, start, start + count):
            if sum(map(self.cache.num_held, self._leaving)) > self._num_promised:
                self._num_promised += 1
                return False
            victim = self._victim(seq)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _victim(self, seq: Sequence) -> Sequence:
        """Who makes room for `seq`: of the least priority, then what loses least; or itself."""
        rank = self._waiting.rank
        later = [s for s in self._running if rank(s) >= rank(seq)]
        least = max(rank(s)[0] for s in later)
        return min(
            (s for s in later if rank(s)[0] == least and (s is not seq or len(later) == 1)),
            key=lambda s: (s.num_computed, -s.arrival),
            default=seq,
        )

    def _preempt(self, seq: Sequence) -> None:
        del self._running[seq]
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(seq)
        self._let_go(seq)

    def _prefill_chunks(
        self, num_decodes: int, prefilling: list[Sequence], is_decoding: bool
    ) -> list[Chunk]:
        config = self.config
        limit = config.max_num_batched_tokens - num_decodes
        if is_decoding and config.enable_chunked_prefill:
            limit = min(limit, config.prefill_chunk_size)
        under_way = [(seq, seq.num_computed) for seq in prefilling]
        in_order = merge(under_way, self._admissible(), key=lambda at: self._waiting.rank(at[0]))
        sequences: list[Sequence] = []
        pieces: list[Piece] = []
        wanted = 0
        for seq, start in in_order:
            if wanted >= limit:
                break
            sequences.append(seq)
            pieces.append(self._piece(seq, start))
            wanted += pieces[-1].tokens
        chunks: list[Chunk] = []
        counts = self.buckets.fill(num_decodes, pieces, limit)
        for seq, piece, count in zip(sequences, pieces, counts, strict=False):
            if seq.status is Status.WAITING and (seq.in_flight or not self._admit(seq, piece)):
                break
            start = seq.num_computed
            count = min(count, seq.num_tokens - start)
            if seq.status is Status.RUNNING and self._extend(seq, start, count):
                chunks.append(Chunk(seq, start, count, start + count == seq.num_tokens))
        return chunks

    def _piece(self, seq: Sequence, start: int) -> Piece:
        remaining = seq.num_tokens - start
        if self.config.enable_chunked_prefill:
            return Piece(min(remaining, self.config.prefill_chunk_size), whole=False)
        # What is recomputed may have outgrown the largest step, which its prompt did not.
        return Piece(remaining, whole=not seq.output_len)

    def _admissible(self) -> Iterator[tuple[Sequence, int]]:
        """The waiting sequences that could start now, in order, and where they would."""
        room = min(self.buckets.max_seqs - len(self._running), len(self._free_slots))
        free = self.cache.num_available
        watermark = self.config.watermark * self.cache.pool.num_blocks
        rank = self._waiting.rank
        # Kept for those who rank before the one that comes.
        first = min(map(rank, self._running), default=None)
        for seq in self._waiting.first(MOST_LOOKED_AT if room > 0 else 0):
            if seq.in_flight:
                return
            match = self.cache.match(seq)
            if self._waits(seq, match):
                continue
            free -= self.cache.needed(seq, match)
            reserve = watermark if first is not None and first < rank(seq) else 0
            if free < reserve or room == 0:
                return
            yield seq, match.num_tokens
            room -= 1
            first = first or rank(seq)

    def _admit(self, seq: Sequence, piece: Piece) -> bool:
        """Lets a sequence run; False where those admitted before it took what it needs."""
        match = self.cache.match(seq)
        outgrown = piece.whole and self._piece(seq, match.num_tokens) != piece
        if self._waits(seq, match) or outgrown or not self.cache.admit(seq, match):
            return False
        self._waiting.remove(seq)
        seq.status = Status.RUNNING
        seq.slot = self._free_slots.pop()
        self._running[seq] = None
        self._fresh.add(seq)
        return True

    def _waits(self, seq: Sequence, match: Match) -> bool:
        """Whether one that ranks before it is about to compute what it needs as well."""
        rank = self._waiting.rank
        return match.owner is not None and rank(match.owner) < rank(seq)

    def _pages(self, num_tokens: int) -> int:
        return self.cache.layout.num_blocks(num_tokens)

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
        delta.num_cached_tokens = seq.num_cached_tokens
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
        check_balance(self.cache, holders)
        slots = [seq.slot for seq in holders if seq.slot >= 0] + self._free_slots
        empty = [seq for seq in waiting if seq not in self._leaving]
        rows = Counter(chunk.seq for plan in self._in_flight for chunk in plan.chunks)
        live = [seq for choices in self._requests.values() for seq in choices.values()]
        size = self.cache.layout.block_size
        accounts = {
            "slots": sorted(slots) == list(range(self.config.max_num_seqs)),
            "waiting without pages": not any(s.block_tables or s.slot >= 0 for s in empty),
            "rows in flight": all(s.in_flight == rows[s] for s in [*live, *holders, *rows]),
            "positions": all(
                s.num_computed <= min(map(len, s.block_tables)) * size for s in running
            ),
            "live sequences": set(live) == {*running, *waiting} == set(self._max_len),
            "waiting requests": self._waiting.num_requests == len({s.request.id for s in waiting}),
        }
        if wrong := [name for name, ok in accounts.items() if not ok]:
            raise RuntimeError(f"the scheduler's accounts are off: {', '.join(wrong)}")
