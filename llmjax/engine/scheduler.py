"""Who runs in the next step. Pure Python, no jax.

`schedule` plans step n+1 while step n runs, so a plan counts on tokens that the host has not
seen (`Sequence.num_pending`); `commit` brings the results in, in the order of the plans
(`growth.py`).

The rules:

- Each step takes all running decodes, then prompts under way, then waiting ones in the order
  of the policy. A waiting sequence is admitted with pages for all of its tokens (of a window,
  for those it starts with), so that hardly anything but decodes ever asks for more; the first
  that there is no room for begins early (`admission.py`). What the cache remembers of them is
  not computed again; one whose beginning another sequence is about to compute waits for that.
  One that is held (`Sequence.is_held`) is as if it had not come. A chunk ends where a long
  sequence forgets (`cache/eviction.py`).
- Where a model has several stages each step takes a part of the decodes, none of which is in a
  step in flight: as many parts are under way as there are stages, so that all have work.
- On page shortage a running sequence of the least priority goes back to the waiting ones: none
  that ranks before the one in need, and of the others one that loses least work. So the first
  in rank always goes on, of those that are admitted: what began early makes way for them. What a
  preempted sequence has computed stays in the cache for as long as there is room.
- What a grammar leaves no choice of is computed at once where a step has room for it, and else
  token by token, as a decode.
- A plan of decodes alone may have several steps (`lookahead.py`).
- A sequence that stops running (finished, aborted, preempted) keeps its pages and its slot
  until no step in flight includes it, and is not run again before that. One that needs pages
  which are on their way back this way sits out until they come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from heapq import merge
from itertools import islice

from ..cache.manager import KVCache
from ..config import SchedulerConfig
from ..errors import LlmjaxError, StructuredOutputError
from ..request import Sequence, SequenceDelta, Status, TokenLogprobs
from .admission import Candidate
from .buckets import Buckets, Piece
from .growth import Growth
from .lives import Lives
from .lookahead import look_ahead
from .pace import Pace
from .plan import Chunk, Plan
from .room import Room

SMALL_STEP = 32
"""Tokens up to which steps hardly differ in what they take."""


class Scheduler:
    """Sequences from their arrival to their last token.

    Args:
        cache: hands out the pages.
        max_model_len: most tokens of a sequence, prompt and output; the pool holds as many,
            or a sequence alone could get stuck.
        stages: of the model, that steps in flight go through one behind the other.
        clock: gives seconds, from where requests' arrival times come too.

    Attributes:
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
        stages: int = 1,
        clock: Callable[[], float] = time.monotonic,
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
        self.stages = stages
        self.pace = Pace(config)
        self.lives = Lives(
            config,
            cache,
            max_model_len=max_model_len,
            most_prompt=None if config.enable_chunked_prefill else buckets.max_tokens,
            clock=clock,
        )
        self._room = Room(config, buckets, cache, self.lives)
        self.bucket_tokens = 0
        self.padded_tokens = 0
        self._in_flight: deque[Plan] = deque()
        self._growth = Growth(
            self.lives, self._in_flight, several_steps=config.num_scheduler_steps > 1
        )

    # What there is

    @property
    def num_running(self) -> int:
        return len(self.lives.running)

    @property
    def running(self) -> list[Sequence]:
        """In the order in which they began."""
        return list(self.lives.running)

    def first_waiting(self, count: int) -> list[Sequence]:
        """Those to be considered first."""
        return list(islice(self.lives.waiting.in_order(lambda _: 0), count))

    @property
    def num_waiting(self) -> int:
        return len(self.lives.waiting)

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return self.lives.waiting.num_requests

    @property
    def has_work(self) -> bool:
        """Whether anything runs, waits or is in flight. False: pages and slots are all free."""
        return bool(self.lives)

    @property
    def num_preemptions(self) -> int:
        """Times a sequence was preempted, so far."""
        return self.lives.num_preemptions

    # Arrival and departure

    def add(self, seq: Sequence) -> None:
        """Puts a sequence behind the waiting ones.

        Raises:
            InvalidRequestError: it could never run: an empty prompt, more than
                `max_model_len`, or, without chunked prefill, a prompt beyond one step.
            QueueFullError: `max_queue_len` requests wait. The further sequences of a request
                whose first was taken are never refused for this.
        """
        self.lives.add(seq)

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceDelta]:
        """Ends the request, or one of its choices, wherever it is; unknown ids are no error.

        Returns:
            The last delta of each sequence that this ended.
        """
        return self.lives.abort(request_id, index)

    def expire(self) -> list[SequenceDelta]:
        """Ends the requests that are late: not begun, or not ended, by when they had to.

        Returns:
            The last delta of each sequence that this ended, with the error.
        """
        return self.lives.expire()

    # Planning a step

    def schedule(self) -> Plan | None:
        """The next step, or None where nothing can run before a commit or a ready bucket."""
        self._room.make_way()
        chunks, prefilling, is_decoding = self._decode_chunks()
        more = self._prefill_chunks(len(chunks), prefilling, is_decoding)
        # A prompt that needed pages may have preempted who was to decode.
        chunks = [chunk for chunk in chunks + more if chunk.seq.status is Status.RUNNING]
        if not chunks:
            return None
        if self.config.num_scheduler_steps > 1 and not (more or self._room.num_promised):
            most = self.config.num_scheduler_steps
            look_ahead(chunks, most, self.lives.max_len, self.cache, self.buckets)
        tokens = sum(chunk.width for chunk in chunks)
        pages = self.cache.layout.num_blocks(max(chunk.kv_len for chunk in chunks))
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
        admitted = [chunk for chunk in chunks if chunk.seq in self.lives.fresh]
        self.lives.fresh.difference_update(chunk.seq for chunk in admitted)
        transfers = self.cache.take_transfers()
        plan = Plan(chunks, bucket, tokens, pages, admitted, transfers)
        self._in_flight.append(plan)
        return plan

    def _decode_chunks(self) -> tuple[list[Chunk], list[Sequence], bool]:
        """Decodes that have a page, prompts under way, and whether any sequence decodes."""
        chunks: list[Chunk] = []
        prefilling: list[Sequence] = []
        is_decoding, most = False, self._most_decodes()
        one_by_one = self._goes_one_by_one()
        for seq in sorted(self.lives.running, key=self.lives.waiting.rank):
            if seq.status is not Status.RUNNING:
                continue  # preempted just now for one that ranks before it
            known, start = seq.num_tokens, seq.num_computed
            is_behind = known - start > 1
            is_prompt = known == seq.prompt_len or self.lives.admission.end_of(seq) < known
            if is_prompt or (is_behind and not (one_by_one and _has_jumped(seq))):
                prefilling.append(seq)
            elif known < self.lives.max_len[seq]:
                is_decoding = True
                waits = len(chunks) >= most or (self.stages > 1 and seq.num_pending)
                if not waits and self._room.extend(seq, start, 1):
                    chunks.append(Chunk(seq, start, 1, int(not is_behind), seq.num_dropped))
        prefilling = [seq for seq in prefilling if seq.status is Status.RUNNING]
        return chunks, prefilling, is_decoding

    def _goes_one_by_one(self) -> bool:
        """Whether what grammars left no choice of is computed a token a step.

        It is where all at once would take a program that costs more than what it saves: of each
        token its share of a step.
        """
        running = self.lives.running
        behind = [seq.num_tokens - seq.num_computed for seq in running if _has_jumped(seq)]
        if not behind:
            return False
        saved = sum(behind) - len(behind)
        single = self.buckets.choose(len(running), len(running), True, 1)
        at_once = self.buckets.choose(len(running) + saved, len(running), False, 1)
        if single is None or at_once is None:
            return False
        step = max(single.tokens, SMALL_STEP)
        return at_once.tokens - step > saved * step / len(running)

    def _most_decodes(self) -> int:
        """Decodes in a step: an equal part of all, for each stage."""
        running = self.lives.running
        if self.stages == 1:
            return len(running)
        decoding = sum(seq.prompt_len < seq.num_tokens < self.lives.max_len[seq] for seq in running)
        return -(-decoding // self.stages)

    def _prefill_chunks(
        self, num_decodes: int, prefilling: list[Sequence], is_decoding: bool
    ) -> list[Chunk]:
        config = self.config
        limit = config.max_num_batched_tokens - num_decodes
        if is_decoding and config.enable_chunked_prefill:
            limit = min(limit, self.pace.limit(num_decodes))
        admission = self.lives.admission
        under_way = [Candidate(s, s.num_computed, admission.end_of(s)) for s in prefilling]
        under_way = [at for at in under_way if at.start < at.end]
        seats = min(self.buckets.max_seqs - len(self.lives.running), len(self.lives.free_slots))
        waiting = admission.candidates(self.lives.running, seats)
        # What never ran comes in the order of the policy, behind the rest of its priority.
        in_order = merge(under_way, waiting, key=lambda at: self.lives.waiting.rank(at.seq)[:2])
        candidates: list[Candidate] = []
        pieces: list[Piece] = []
        wanted = 0
        for at in in_order:
            if wanted >= limit:
                break
            candidates.append(at)
            pieces.append(self._piece(at))
            wanted += pieces[-1].tokens
        chunks: list[Chunk] = []
        counts = self.buckets.fill(num_decodes, pieces, limit)
        for at, piece, count in zip(candidates, pieces, counts, strict=False):
            seq = at.seq
            if seq.status is Status.WAITING and not self._begin(at, piece):
                break
            start = seq.num_computed
            count = min(count, self._run_end(at._replace(start=start)) - start)
            if seq.status is Status.RUNNING and self._room.extend(seq, start, count):
                samples = int(start + count == seq.num_tokens)
                chunks.append(Chunk(seq, start, count, samples, seq.num_dropped))
        return chunks

    def _piece(self, at: Candidate) -> Piece:
        remaining = self._run_end(at) - at.start
        if self.config.enable_chunked_prefill:
            return Piece(min(remaining, self.config.prefill_chunk_size), whole=False)
        # What is recomputed may have outgrown the largest step, which its prompt did not.
        return Piece(remaining, whole=not at.seq.output_len)

    def _begin(self, at: Candidate, piece: Piece) -> bool:
        """Lets a sequence run, if this step still holds what is to be computed of it."""

        def fits(start: int) -> bool:
            return not piece.whole or self._piece(at._replace(start=start)) == piece

        return self.lives.begin(at, fits)

    def _run_end(self, at: Candidate) -> int:
        """Where a chunk must end: with the tokens there is room for, or as others are evicted."""
        return self.cache.layout.run_end(at.start, at.end)

    # Results of a step

    def commit(
        self,
        plan: Plan,
        token_ids: Collection[list[int]],
        logprobs: list[list[TokenLogprobs]] | None = None,
        prompt_logprobs: list[list[TokenLogprobs]] | None = None,
    ) -> list[SequenceDelta]:
        """Takes in what the oldest step in flight gave.

        Args:
            plan: that step.
            token_ids: for each chunk the tokens sampled, in order; ignored where it does not
                sample, and behind one that ends the sequence.
            logprobs: of these tokens; empty where not asked for.
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
            logprobs or [[]] * len(plan.chunks),
            prompt_logprobs or [[]] * len(plan.chunks),
            strict=True,
        )
        deltas = []
        for chunk, tokens, scores, prompt in rows:
            seq = chunk.seq
            seq.in_flight -= 1
            seq.num_pending -= chunk.samples
            if seq.status is not Status.FINISHED:
                try:
                    news = self._growth.grow(chunk, tokens, scores, prompt)
                except StructuredOutputError as error:
                    deltas += self.lives.fail(seq.request.id, error)
                    continue
                if news.token_ids or news.prompt_logprobs:
                    deltas.append(news)
            if seq.status is not Status.RUNNING:
                self.lives.let_go(seq)
        return deltas

    def fail_steps(self, error: LlmjaxError) -> list[SequenceDelta]:
        """Ends the requests of the steps in flight, of which nothing will come any more.

        All pages have lost what they held: the other sequences that run wait again, and nothing
        is cached.

        Returns:
            The last delta of each sequence that this ended, with the error.
        """
        chunks = [chunk for plan in self._in_flight for chunk in plan.chunks]
        self._in_flight.clear()
        for chunk in chunks:
            chunk.seq.in_flight -= 1
            chunk.seq.num_pending -= chunk.samples
        deltas: list[SequenceDelta] = []
        for request_id in dict.fromkeys(chunk.seq.request.id for chunk in chunks):
            deltas += self.lives.fail(request_id, error)
        self.lives.lose_pages()
        return deltas

    def check_balance(self) -> None:
        """Compares every account with what the sequences hold; for tests and debugging.

        Raises:
            RuntimeError: an account is off; says which.
        """
        self.lives.check_balance(self._in_flight)


def _has_jumped(seq: Sequence) -> bool:
    """Whether it has output that was never computed, but for its last token. What was, before a
    preemption, comes back as a prompt does."""
    return not seq.num_preemptions and seq.prompt_len <= seq.num_computed < seq.num_tokens - 1
