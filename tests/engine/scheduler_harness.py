"""A scheduler in front of a device that is made of hashes, with every rule checked each step.

The device keeps real pages and a history per slot, runs steps in order, and derives each
token from what it reads there: a page handed out too early or a wrong position changes the
tokens, which are compared with those of the same sequence alone.
"""

from collections import defaultdict, deque
from itertools import accumulate, count, pairwise

from hypothesis import HealthCheck, settings

from llmjax.cache.block_pool import BlockPool
from llmjax.cache.eviction import Eviction
from llmjax.cache.host_pool import HostPool, MoveCosts
from llmjax.cache.layout import KVLayout
from llmjax.cache.manager import KVCache
from llmjax.cache.page_store import Bring, Condense, Copy, Load, Save
from llmjax.cache.way import GONE, resident_pages
from llmjax.config import CompileConfig, SchedulerConfig
from llmjax.engine.buckets import Buckets
from llmjax.engine.scheduler import Scheduler
from llmjax.errors import RequestFailedError
from llmjax.request import (
    FinishReason,
    Request,
    RequestOptions,
    SamplingParams,
    Sequence,
    Status,
    TokenLogprobs,
)

VOCAB = 20
EOS = 0
STOP = 1
RANDOM_LOADS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def mix(state: int, token: int) -> int:
    return ((state ^ (token + 1)) * 0x9E3779B1 + (state >> 7)) & 0xFFFFFFFF


def next_token(state: int, seed: int) -> int:
    return (state // 7 + seed) % VOCAB


def prompt_logprob(state: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -float(state % 97), 1, (), ())


class Forcing:
    """A grammar that allows all, and leaves no choice behind some tokens."""

    def __init__(self):
        self.forced, self.is_complete = [], False

    def start(self):
        return Forcing()

    def accept(self, token):
        assert not self.forced or token == self.forced[0]
        self.forced = self.forced[1:] or self.behind(token)

    @staticmethod
    def behind(token):
        return [(token * k + 3) % VOCAB for k in range(1, token % 4)] if token % 3 == 2 else []


def stops(seq: Sequence, token: int, position: int) -> bool:
    """Whether a token of the output ends it, there."""
    params = seq.request.params
    is_eos = token == EOS and not params.ignore_eos
    counts = position >= seq.prompt_len + params.min_tokens
    return counts and (is_eos or token in params.stop_token_ids)


def alone(seq: Sequence, max_len: int) -> tuple[list[int], FinishReason]:
    """The output tokens of a sequence that nobody disturbs, and why it ends."""
    state, output = 7, []
    forcing = seq.constraint and Forcing()
    for token in seq.request.prompt_token_ids:
        state = mix(state, token)
    while True:
        token = next_token(state, seq.seed)
        if forcing:
            token = forcing.forced[0] if forcing.forced else token
            forcing.accept(token)
        if stops(seq, token, seq.prompt_len + len(output)):
            return [*output, token], FinishReason.STOP
        output.append(token)
        state = mix(state, token)
        if seq.prompt_len + len(output) == max_len:
            return output, FinishReason.LENGTH


def prompt_logprobs(seq: Sequence) -> list[TokenLogprobs]:
    state, entries = 7, []
    for token, follower in pairwise(seq.request.prompt_token_ids):
        state = mix(state, token)
        entries.append(prompt_logprob(state, follower))
    return entries


def most_wanted(rows: list, count: int) -> list:
    """Some of the rows, in order, which say themselves how much they are wanted."""
    chosen = sorted(range(len(rows)), key=lambda i: (mix(rows[i], 5), i))[:count]
    return [rows[i] for i in sorted(chosen)]


def resident(eviction, states: list) -> list:
    """The rows that the next token sees of those before it, whose states are given."""
    if eviction is None or len(states) < eviction.budget:
        return states
    dropped, kept = eviction.dropped(len(states)), eviction.kept
    if not eviction.selects:
        sinks = [mix(state, dropped) for state in states[:kept]]
        return sinks + states[dropped + kept :]
    rows, end = states[: eviction.budget], eviction.budget
    while end <= len(states):
        split = eviction.budget - eviction.recent
        more = states[end : end + eviction.quantum]
        rows = most_wanted(rows[:split], kept) + rows[split:] + more
        end += eviction.quantum
    return rows


class HashDevice:
    """Each group's pages hold the same; of a window all is read that a token sees."""

    def __init__(self, num_blocks, layout, num_slots, max_model_len, host_slots):
        self.layout = layout
        self.block_size = layout.block_size
        self.pages = [[None] * self.block_size for _ in range(num_blocks)]
        self.host = [None] * host_slots
        self.num_evictions = 0
        # Rows that ended before the host saw it, and those that went on nevertheless.
        self.ended, self.astray = set(), set()
        self.history = [[None] * max_model_len for _ in range(num_slots)]

    def forget(self) -> None:
        self.pages = [[None] * self.block_size for _ in self.pages]
        self.host = [None] * len(self.host)
        self.history = [[None] * len(row) for row in self.history]

    def move(self, transfers) -> None:
        for transfer in transfers:
            match transfer:
                case Copy(source, target):
                    self.pages[target] = list(self.pages[source])
                case Save(page, slot):
                    self.host[slot] = list(self.pages[page])
                case Load(slot, page):
                    assert self.host[slot] is not None, "loaded what was never saved"
                    self.pages[page] = list(self.host[slot])
                case Bring(slot, contents):
                    self.host[slot] = contents[0].tolist()
                case Condense():
                    self._condense(transfer)

    def _condense(self, what) -> None:
        self.num_evictions += 1
        eviction, size = self.layout.eviction, self.block_size
        written = []
        for group, window in enumerate(self.layout.windows):
            if window is not None:
                continue
            rows = [row for page in what.sources[group] for row in self.pages[page]]
            # Of a sequence that ended before the host saw it, rows were never written.
            rows = [5 if row is None else row for row in rows]
            if eviction.selects:
                assert len(rows) == eviction.budget
                rows = most_wanted(rows[: eviction.budget - eviction.recent], eviction.kept)
            else:
                rows = [mix(row, what.dropped) for row in rows]
            for i, page in enumerate(what.targets[group]):
                written.append((page, rows[i * size : (i + 1) * size]))
        for page, rows in written:
            self.pages[page] = rows

    def run(self, plan):
        """Tokens and prompt logprobs of each chunk."""
        self.move(plan.transfers)
        for chunk in plan.admitted:
            self.history[chunk.seq.slot][: len(chunk.seq.tokens)] = chunk.seq.tokens
        tokens, prompts = [], []
        for chunk in plan.chunks:
            seq, end = chunk.seq, chunk.start + chunk.count
            history, states = self.history[seq.slot], []
            size, groups = self.block_size, range(self.layout.num_groups)
            tables = [resident_pages(seq, group, size) for group in groups]
            sampled = []
            if seq in self.astray or (seq in self.ended and plan.num_steps == 1):
                # It computes what comes of what happens to lie there.
                self.astray.add(seq)
                at, history[end], states = chunk.start - chunk.dropped, 3, [5]
                for table in tables:
                    self.pages[table[at // size]][at % size] = 5
                tokens.append([3] * chunk.samples)
                prompts.append([])
                continue
            for position in range(chunk.start, end):
                if position < len(seq.tokens):
                    history[position] = seq.tokens[position]
                if plan.num_steps > 1 and stops(seq, history[position], position):
                    self.ended.add(seq)
                    break
                assert self._dropped(position) == chunk.dropped, "a chunk goes on as tokens leave"
                before = [7, *self._states(history[:position])]
                for table, window in zip(tables, self.layout.windows, strict=True):
                    last = position - chunk.dropped
                    first = 0 if window is None else max(0, last - window + 1)
                    seen = [self._read(table, at) for at in range(first, last)]
                    if window is None:
                        expected = resident(self.layout.eviction, before[1:])
                    else:
                        expected = before[1:][max(0, position - window + 1) :]
                    assert seen == expected, "read what another wrote"
                state = mix(before[-1], history[position])
                for table in tables:
                    at = position - chunk.dropped
                    self.pages[table[at // size]][at % size] = state
                states.append(state)
                if position >= end - chunk.samples:
                    sampled.append(next_token(state, seq.seed))
                    if position + 1 < len(history):
                        history[position + 1] = sampled[-1]
            ended = [-1] * (chunk.samples - len(sampled))
            if ended and end < len(history):
                history[end] = history[chunk.start + len(sampled)]
            tokens.append(sampled + ended)
            # All choices have the same prompt: the first one tells.
            wanted = seq.request.params.prompt_logprobs is not None and not seq.index
            first = max(chunk.start, seq.num_prompt_logprobs)
            ids = seq.request.prompt_token_ids[first + 1 : end + 1]
            rows = zip(states[first - chunk.start :], ids, strict=False)
            prompts.append([prompt_logprob(s, t) for s, t in rows] if wanted else [])
        return tokens, prompts

    def _dropped(self, position: int) -> int:
        eviction = self.layout.eviction
        return 0 if eviction is None else eviction.dropped(position)

    def _states(self, tokens) -> list[int]:
        return list(accumulate(tokens, mix, initial=7))[1:]

    def _read(self, table, at: int) -> int:
        page = table[at // self.block_size]
        assert page != GONE, "read a page that was given back"
        return self.pages[page][at % self.block_size]


def forced(chunk) -> bool:
    """Whether what it computes was forced, and more of it follows."""
    return chunk.start >= chunk.seq.prompt_len and not chunk.samples


class Harness:
    """Drives a scheduler and the hash device, up to `depth` steps in flight, at least `stages`.

    A pool that holds less than `max_model_len` lowers it, as an engine does.
    """

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        *,
        compile_config: CompileConfig | None = None,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 64,
        depth: int = 2,
        stages: int = 1,
        ready: bool = True,
        windows: tuple = (None,),
        caching: bool = False,
        host_slots: tuple[int, int] = (0, 0),
        costs: MoveCosts | None = None,
        eviction: Eviction | None = None,
    ):
        self.config = config or SchedulerConfig()
        self.now = 0.0
        chunk = self.config.prefill_chunk_size
        self.beside_decodes = min(chunk, self.config.mixed_prefill_tokens or chunk)
        layout = KVLayout(block_size, windows, eviction=eviction)
        chunk = max_model_len
        if self.config.enable_chunked_prefill:
            chunk = min(chunk, self.config.prefill_chunk_size)
        while layout.most_pages(max_model_len, chunk) > num_blocks:
            max_model_len -= 1
        self.buckets = Buckets(
            self.config,
            compile_config or CompileConfig(),
            max_model_len=layout.whole(max_model_len),
            block_size=block_size,
        )
        self.pool = BlockPool(num_blocks)
        self.host = HostPool(*host_slots, costs or MoveCosts()) if sum(host_slots) else None
        self.cache = KVCache(
            self.pool, layout, enable_prefix_caching=caching, host=self.host, chunk=chunk
        )
        self.scheduler = Scheduler(
            self.config,
            self.buckets,
            self.cache,
            max_model_len=max_model_len,
            stages=stages,
            clock=lambda: self.now,
        )
        slots = self.config.max_num_seqs
        self.device = HashDevice(num_blocks, layout, slots, max_model_len, sum(host_slots))
        self.depth, self.stages = max(depth, stages), stages
        self.in_flight: deque = deque()
        self.sequences: dict[tuple[str, int], Sequence] = {}
        self.max_len: dict[tuple[str, int], int] = {}
        self.output = defaultdict(list)
        self.prompt_logprobs = defaultdict(list)
        self.finish = {}
        self.last_admitted = 0
        self.ids = map(str, count())
        if ready:
            self.all_ready()

    def all_ready(self) -> None:
        for bucket in self.buckets.all:
            self.buckets.mark_ready(bucket)

    def add(
        self,
        prompt: list[int],
        *,
        id: str | None = None,
        options: dict | None = None,
        forces: bool = False,
        **params,
    ) -> list[Sequence]:
        """Adds the sequences of one request; raises what the scheduler raises for the first."""
        request = Request(
            id or next(self.ids),
            prompt,
            SamplingParams(**params),
            eos_token_ids=frozenset({EOS}),
            options=RequestOptions(**(options or {})),
            arrival_time=self.now,
        )
        added = []
        for index in range(request.params.n):
            seq = Sequence(request, index, index, list(prompt))
            seq.constraint = Forcing() if forces else None
            self.scheduler.add(seq)
            key = (request.id, index)
            self.sequences[key] = seq
            self.max_len[key] = self.scheduler.lives.max_len[seq]
            added.append(seq)
        self.scheduler.check_balance()
        return added

    def abort(self, request_id: str, index: int | None = None) -> list:
        deltas = self.scheduler.abort(request_id, index)
        self._receive(deltas)
        self.scheduler.check_balance()
        return deltas

    def fail(self) -> list:
        """The device loses the steps in flight, and all that it and host memory held."""
        failed = {chunk.seq.request.id for plan, *_ in self.in_flight for chunk in plan.chunks}
        live = {key for key in self.sequences if key[0] in failed and key not in self.finish}
        self.in_flight.clear()
        self.device.forget()
        deltas = self.scheduler.fail_steps(RequestFailedError("the device fell off"))
        assert {(delta.request_id, delta.index) for delta in deltas} == live
        self._receive(deltas)
        self.scheduler.check_balance()
        assert not self.pool.num_used and not (self.host and self.host.num_used)
        return deltas

    def wait(self, seconds: float) -> list:
        """Time passes; what is late ends."""
        self.now += seconds
        deltas = self.scheduler.expire()
        self._receive(deltas)
        self.scheduler.check_balance()
        return deltas

    def dispatch(self):
        """Schedules and starts a step; None where there is none."""
        scheduler = self.scheduler
        running = list(scheduler.lives.running)
        decodes = [s for s in running if self._decodes(s)]
        waiting = [seq for seq in scheduler.lives.waiting if not seq.is_held]
        live = sorted((*running, *waiting), key=scheduler.lives.waiting.rank)
        oldest = live[0] if live else None
        was_idle = oldest is not None and not oldest.in_flight and not scheduler.lives.leaving
        preemptions = oldest.num_preemptions if oldest else 0
        pending = {seq for seq in decodes if seq.num_pending}
        before = scheduler.num_preemptions
        early = scheduler.lives.admission.early
        plan = scheduler.schedule()
        scheduler.check_balance()
        rows = {chunk.seq for chunk in plan.chunks} if plan else set()
        for seq in decodes:
            excused = scheduler._room.num_promised or seq.status is Status.WAITING
            if self.stages > 1:
                part = -(-len(decodes) // self.stages)
                excused |= seq in pending or len(rows.intersection(decodes)) >= part
                # Parts are of those that are left when others have made way.
                excused |= scheduler.num_preemptions > before
            assert seq in rows or excused, "a decode was left out"
        waits = oldest is not None and oldest is early
        if was_idle and not waits and self.config.enable_chunked_prefill and self.buckets.max_seqs:
            # It may take another step to make way for one of higher priority, or one that was
            # passed by as it waited for its beginning.
            behind = self.config.scheduling_policy == "priority" or self.can_hit(oldest)
            waits = behind and oldest not in running
            # What never ran comes in an order that is not that of arrival.
            ordered = self.config.scheduling_policy == "lpm" or self.config.fair_users
            waits |= ordered and not oldest.turn
            # Where tokens leave, several came at once, or others are in flight, it may need pages
            # that come back when a step has ended.
            grows = self.cache.layout.eviction is not None or oldest.constraint is not None
            grows |= self.stages > 1
            waits |= grows and scheduler._room.num_promised > 0
            assert oldest in rows or waits, "the oldest sequence does not go on"
        if oldest and oldest is not early:
            assert oldest.num_preemptions == preemptions, "the oldest was preempted"
        if plan is None:
            return None
        if self.stages > 1:
            known = all(c.start + c.count <= len(c.seq.tokens) for c in plan.chunks)
            assert known, "a stage needs a token that another is to sample"
        # What began early and had one token of its output left is a decode from its admission on.
        decodes += [
            chunk.seq
            for chunk in plan.chunks
            if chunk.seq is early and chunk.start >= chunk.seq.prompt_len
            if chunk.samples == chunk.count
        ]
        self._check(plan, decodes)
        self._check_early(plan, early)
        # Who had a place and then no page left padding behind.
        if scheduler.num_preemptions == before and not scheduler._room.num_promised:
            self._check_padding(plan, decodes)
        tables = [(seq, list(map(list, seq.block_tables)), seq.slot) for seq in rows]
        self.in_flight.append((plan, self.device.run(plan), tables))
        return plan

    def _decodes(self, seq: Sequence) -> bool:
        key = (seq.request.id, seq.index)
        known = seq.num_tokens
        alive = seq.prompt_len < known < self.max_len[key]
        alive &= self.scheduler.lives.admission.end_of(seq) == known
        return alive and known - seq.num_computed == 1

    def _check(self, plan, decodes) -> None:
        bucket, chunks, config = plan.bucket, plan.chunks, self.config
        counts = [chunk.width for chunk in chunks]
        if plan.num_steps > 1:
            assert plan.num_steps <= config.num_scheduler_steps and bucket.decode_only
            assert all(c.samples == c.count and not c.seq.constraint for c in chunks)
            assert all(c.start + c.count < self.max_len_of(c.seq) for c in chunks)
        assert bucket in self.buckets.ready
        assert plan.num_tokens == sum(counts) <= min(bucket.tokens, config.max_num_batched_tokens)
        assert len(chunks) <= min(bucket.seqs, config.max_num_seqs)
        assert len({chunk.seq for chunk in chunks}) == len(chunks)
        assert not bucket.decode_only or set(counts) == {1}
        assert plan.num_pages <= bucket.pages
        size = self.cache.layout.block_size
        assert plan.num_pages == max(-(-c.kv_len // size) for c in chunks)
        fresh = {chunk.seq for chunk in plan.admitted}
        decodes = [s for s in decodes if s.status is Status.RUNNING and s not in fresh]
        prompts = [chunk for chunk in chunks if chunk.seq not in decodes]
        if config.enable_chunked_prefill:
            assert all(chunk.count <= config.prefill_chunk_size for chunk in prompts)
            if decodes:
                assert sum(chunk.count for chunk in prompts) <= self.beside_decodes
        for chunk in prompts:
            if not config.enable_chunked_prefill and not chunk.seq.output_len:
                assert chunk.start + chunk.count == chunk.seq.prompt_len
        assert set(plan.admitted) <= set(prompts)
        assert all(c.start == 0 for c in plan.admitted if not self.can_hit(c.seq))

    def _check_early(self, plan, before) -> None:
        """What began early is not computed to its end, and holds up nobody but those behind it."""
        admission, rank = self.scheduler.lives.admission, self.scheduler.lives.waiting.rank
        early = admission.early
        if early is None:
            return
        assert self.config.enable_chunked_prefill
        assert not any(c.samples for c in plan.chunks if c.seq is early)
        assert early.num_computed <= admission.end_of(early) < len(early.tokens)
        admitted = [chunk.seq for chunk in plan.admitted]
        if before is early and early not in admitted:
            behind = [seq for seq in admitted if rank(seq) > rank(early)]
            assert not behind, "one that there is no room for was overtaken"

    def max_len_of(self, seq) -> int:
        return self.max_len[seq.request.id, seq.index]

    def can_hit(self, seq) -> bool:
        shares = self.cache.enable_prefix_caching or seq.request.params.n > 1
        return shares or seq.num_preemptions or seq.num_brought

    def _check_padding(self, plan, decodes) -> None:
        """Padding beyond the bound is only there because nothing that waits could fill it."""
        config, scheduler = self.config, self.scheduler
        padding = plan.bucket.tokens - plan.num_tokens
        if padding <= config.max_paddings * plan.bucket.tokens or not config.enable_chunked_prefill:
            return
        # What is forced goes token by token where that is cheaper, or as a prompt cut to one token.
        rest = [chunk for chunk in plan.chunks if chunk.seq not in decodes]
        prompts = [chunk for chunk in rest if not (chunk.count == 1 and forced(chunk))]
        if plan.bucket.decode_only and not prompts:
            return
        limit = self.beside_decodes if decodes else config.max_num_batched_tokens
        limit = min(limit, config.max_num_batched_tokens - len(decodes))
        if limit in (sum(c.count for c in prompts), sum(c.count for c in rest)):
            return
        if not {chunk.seq for chunk in plan.chunks}.issuperset(decodes):
            return  # a stage takes a part of the decodes
        for chunk in prompts:
            if chunk in plan.admitted and self.can_hit(chunk.seq):
                continue  # others admitted with it may have taken what it would have copied
            end = min(
                chunk.seq.num_tokens - chunk.samples, scheduler.lives.admission.end_of(chunk.seq)
            )
            left = self.cache.layout.run_end(chunk.start, end) - chunk.seq.num_computed
            assert not left or chunk.count == config.prefill_chunk_size, "padding beside a prompt"
        chunked = {chunk.seq for chunk in plan.chunks}
        starting = [s for s in scheduler.lives.running if not s.in_flight and s not in chunked]
        starting = [s for s in starting if s.num_computed < scheduler.lives.admission.end_of(s)]
        most = dict(self.buckets._ready.edges).get(plan.bucket.tokens, 0)
        is_plain = (
            config.forecast_margin is None
            and config.scheduling_policy == "fcfs"
            and not config.fair_users
            and self.cache.layout.windows == (None,)
            and self.cache.layout.eviction is None
            and not any(seq.constraint for seq in scheduler.lives.running)
        )
        if not is_plain:
            return  # what was to be had before the step cannot be told after it
        assert not starting or len(plan.chunks) == most, "padding beside a running prompt"
        waiting = [seq for seq in scheduler.lives.waiting if not seq.is_held]
        head = min(waiting, key=scheduler.lives.waiting.rank, default=None)
        if scheduler.lives.admission.early or (head and self.can_hit(head)):
            return
        if head and not head.in_flight and len(plan.chunks) < most:
            needed = self.cache.needed(head, self.cache.match(head))
            has_room = self.cache.num_available >= needed
            seats = min(config.max_num_seqs, self.buckets.max_seqs) - scheduler.num_running
            has_seat = seats > 0 and bool(scheduler.lives.free_slots)
            assert not (has_room and has_seat), "padding beside a waiting prompt"

    def commit(self) -> list:
        """Brings in the oldest step in flight."""
        plan, (tokens, prompts), tables = self.in_flight.popleft()
        for seq, groups, slot in tables:
            assert seq.block_tables, "pages of a step in flight were freed"
            for now, then in zip(seq.block_tables, groups, strict=True):
                kept = all(n in (t, GONE) for n, t in zip(now, then, strict=False))
                assert kept and len(now) >= len(then), "pages of a step in flight were freed"
            assert seq.slot == slot
        deltas = self.scheduler.commit(plan, tokens, prompt_logprobs=prompts)
        self._receive(deltas)
        self.scheduler.check_balance()
        return deltas

    def _receive(self, deltas) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert key not in self.finish, "news of a finished sequence"
            self.output[key] += delta.token_ids
            self.prompt_logprobs[key] += delta.prompt_logprobs
            if delta.finish_reason:
                self.finish[key] = delta.finish_reason

    def step(self) -> bool:
        """Fills the pipeline, then commits its oldest step. False: nothing to do."""
        while len(self.in_flight) < self.depth and self.dispatch():
            pass
        if self.in_flight:
            self.commit()
            return True
        return False

    def drain(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.step():
                break
        assert not self.scheduler.has_work, "work is left, and nothing goes on"
        assert self.cache.num_used == 0
        assert self.cache.enable_prefix_caching or self.pool.num_used == 0
        assert sorted(self.scheduler.lives.free_slots) == list(range(self.config.max_num_seqs))

    def check_outputs(self) -> None:
        """Each sequence said what it says alone; aborted ones the beginning of it."""
        for key, seq in self.sequences.items():
            expected, reason = alone(seq, self.max_len[key])
            assert key in self.finish
            if self.finish[key] is FinishReason.ABORT:
                assert self.output[key] == expected[: len(self.output[key])]
                continue
            assert self.output[key] == expected == seq.tokens[seq.prompt_len :]
            assert self.finish[key] is reason
            if seq.request.params.prompt_logprobs is not None and not seq.index:
                assert self.prompt_logprobs[key] == prompt_logprobs(seq)
