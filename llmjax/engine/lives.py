"""Sequences from their arrival to their end: who waits, runs and leaves, and what each holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from ..cache.balance import check_balance
from ..cache.manager import KVCache
from ..config import SchedulerConfig
from ..errors import InvalidRequestError, LlmjaxError, QueueFullError
from ..request import FinishReason, Sequence, SequenceDelta, Status, longest
from .admission import Admission, Candidate
from .deadlines import Deadlines, QueuePace, late, retry_after
from .plan import Plan
from .waiting import WaitingQueue


def check_room(limit: int | None, queues: Collection[WaitingQueue], now: float) -> None:
    """Raises QueueFullError where no more requests may wait in these queues together."""
    if limit is None or sum(queue.num_requests for queue in queues) < limit:
        return
    # What the way through them takes, at the pace at which they are seen to move; where none
    # has moved yet, what the oldest has waited, at least.
    rates = [1 / seconds for queue in queues if (seconds := queue.pace.seconds(now))]
    arrived = min(queue.oldest.request.arrival_time for queue in queues if len(queue))
    seconds = limit / sum(rates) if rates else now - arrived
    raise QueueFullError(
        f"{limit} requests wait already (max_queue_len)", retry_after=retry_after(seconds)
    )


class Lives:
    """All sequences that have not ended, and those that have and are still in flight.

    Args:
        most_prompt: tokens of a prompt that must go whole in one step; None: it need not.

    Attributes:
        running, waiting: every live sequence is in one of them.
        leaving: stopped running while in flight; the preempted among them wait as well.
        fresh: running, and no step has been told yet what is in their slot.
        max_len: tokens at which each live sequence ends with "length".
        free_slots: rows of the device's per-sequence state.
        num_preemptions: times a sequence was preempted, so far.
        on_end: called with each sequence that has ended, before its pages are let go.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCache,
        *,
        max_model_len: int,
        most_prompt: int | None,
        clock: Callable[[], float],
    ):
        self.config = config
        self.cache = cache
        self.max_model_len = max_model_len
        self.clock = clock
        self.num_preemptions = 0
        self.on_end: Callable[[Sequence], None] | None = None
        self.running: dict[Sequence, None] = {}
        self.waiting = WaitingQueue(
            by_priority=config.scheduling_policy == "priority",
            longest_first=config.scheduling_policy == "lpm",
            fair=config.fair_users,
        )
        self.leaving: dict[Sequence, None] = {}
        self.fresh: set[Sequence] = set()
        self.max_len: dict[Sequence, int] = {}
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.admission = Admission(config, cache, self.waiting, self.max_len)
        self._most_prompt = most_prompt
        self._deadlines = Deadlines(config.queue_timeout)
        self._requests: dict[str, dict[int, Sequence]] = {}
        self._arrivals = 0

    def __bool__(self) -> bool:
        """Whether anything runs, waits or is in flight."""
        return bool(self.running or self.waiting or self.leaving)

    @property
    def pages_coming(self) -> int:
        """That the leaving ones hold."""
        return sum(map(self.cache.num_held, self.leaving))

    def add(self, seq: Sequence) -> None:
        """Puts a sequence behind the waiting ones; see `Scheduler.add`."""
        request = seq.request
        siblings = self._requests.get(request.id, {})
        if seq.index in siblings:
            raise InvalidRequestError(
                f"request {request.id!r} is running already, allowed: an id of its own",
                param="request_id",
            )
        max_len = longest(seq.prompt_len, request.params.max_tokens, self.max_model_len)
        self._check_whole(seq)
        if not siblings:
            check_room(self.config.max_queue_len, [self.waiting], self.clock())
        self._arrivals += 1
        seq.arrival = self._arrivals
        seq.status = Status.WAITING
        self.max_len[seq] = max_len
        if not siblings:
            self._deadlines.add(request)
        if not self.waiting.num_requests:
            self.waiting.pace = QueuePace()
        self._requests.setdefault(request.id, siblings)[seq.index] = seq
        self.waiting.join(seq)

    def _check_whole(self, seq: Sequence) -> None:
        most = self._most_prompt
        if most is not None and seq.prompt_len > most:
            raise InvalidRequestError(
                f"the prompt has {seq.prompt_len} tokens, allowed: up to {most}, those of one "
                "step, as enable_chunked_prefill is off",
                param="prompt",
            )

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceDelta]:
        """Ends the request, or one of its choices; see `Scheduler.abort`."""
        live = self._requests.get(request_id, {})
        return self._fail([seq for seq in live.values() if index is None or seq.index == index])

    def fail(self, request_id: str, error: LlmjaxError) -> list[SequenceDelta]:
        """Ends all choices of a request, which tell the error; an unknown id is ignored."""
        return self._fail(list(self._requests.get(request_id, {}).values()), error)

    def lose_pages(self) -> None:
        """Nothing is in flight, and no page, of the device or the host, holds what it held."""
        for seq in list(self.running):
            self.preempt(seq)
        for seq in list(self.leaving):
            self.let_go(seq)
        self.cache.take_transfers()
        self.cache.reset()

    def expire(self) -> list[SequenceDelta]:
        """Ends the requests that are late; see `Scheduler.expire`."""
        deltas: list[SequenceDelta] = []
        now = self.clock()
        while due := self._deadlines.next_due(now):
            request_id, to_begin = due
            ended = list(self._requests[request_id].values())
            deltas += self._fail(ended, late(ended[0].request, now, to_begin))
        return deltas

    def _fail(
        self, sequences: list[Sequence], error: LlmjaxError | None = None
    ) -> list[SequenceDelta]:
        deltas = []
        for seq in sequences:
            self.finish(seq, FinishReason.ABORT)
            self.let_go(seq)
            delta = SequenceDelta(seq.request.id, seq.index, [], [], error=error)
            delta.finish_reason = FinishReason.ABORT
            deltas.append(delta)
        return deltas

    def begin(self, at: Candidate, fits: Callable[[int], bool]) -> bool:
        """Lets a waiting sequence run, where it still can; see `Admission.admit`."""
        seq = at.seq
        if seq.in_flight or not self.admission.admit(at, fits):
            return False
        seq.status = Status.RUNNING
        if seq is not self.admission.early:
            self._had_its_turn(seq)
        seq.slot = self.free_slots.pop()
        self.running[seq] = None
        self.fresh.add(seq)
        return True

    def review(self) -> None:
        """Admits what began early, where it can be; see `Admission.review`."""
        seq = self.admission.review(self.running)
        if seq is not None:
            self._had_its_turn(seq)

    def _had_its_turn(self, seq: Sequence) -> None:
        if not seq.num_preemptions and not seq.index:
            self.waiting.pace.begun(self.clock())
        self._deadlines.begun(seq.request.id)

    def preempt(self, seq: Sequence) -> None:
        """Sends a running sequence back to the waiting ones."""
        del self.running[seq]
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.admission.left(seq)
        self.waiting.add(seq)
        self.let_go(seq)

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """A sequence has ended; what it holds is to be let go."""
        if seq.status is Status.RUNNING:
            del self.running[seq]
        else:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        self.admission.left(seq)
        del self.max_len[seq]
        self.waiting.leave(seq)
        siblings = self._requests[seq.request.id]
        del siblings[seq.index]
        if not siblings:
            del self._requests[seq.request.id]
            self._deadlines.remove(seq.request.id)

    def let_go(self, seq: Sequence) -> None:
        """Takes back what a sequence that does not run holds, once no step may write there."""
        if seq.in_flight:
            self.leaving[seq] = None
            return
        self.leaving.pop(seq, None)
        self.fresh.discard(seq)
        has_ended = seq.status is Status.FINISHED
        if has_ended and self.on_end is not None:
            self.on_end(seq)
        self.cache.release(seq, wants_back=not has_ended)
        if seq.slot >= 0:
            self.free_slots.append(seq.slot)
            seq.slot = -1
        if has_ended:
            request = seq.request.id
            is_last = request not in self._requests and not any(
                other.request.id == request for other in self.leaving
            )
            self.cache.forget(seq, is_last=is_last)
        else:
            seq.num_computed = 0

    def check_balance(self, in_flight: Collection[Plan]) -> None:
        """Compares every account with what the sequences hold; see `Scheduler.check_balance`."""
        running, waiting = list(self.running), list(self.waiting)
        holders = [*running, *self.leaving]
        check_balance(self.cache, holders)
        slots = [seq.slot for seq in holders if seq.slot >= 0] + self.free_slots
        empty = [seq for seq in waiting if seq not in self.leaving]
        rows = Counter(chunk.seq for plan in in_flight for chunk in plan.chunks)
        live = [seq for choices in self._requests.values() for seq in choices.values()]
        size, forecast = self.cache.layout.block_size, self.admission.forecast
        early = {self.admission.early} - {None}
        accounts = {
            "held": not any(s.is_held for s in holders),
            "slots": sorted(slots) == list(range(self.config.max_num_seqs)),
            "waiting without pages": not any(s.block_tables or s.slot >= 0 for s in empty),
            "rows in flight": all(s.in_flight == rows[s] for s in [*live, *holders, *rows]),
            "positions": all(
                s.num_computed <= min(map(len, s.block_tables)) * size for s in running
            ),
            "forecast": forecast is None or forecast.sequences == set(running) - early,
            "early": early <= set(running),
            "deadlines": all(i in self._requests for i in self._deadlines),
            "live sequences": set(live) == {*running, *waiting} == set(self.max_len),
            "waiting requests": self.waiting.num_requests == len({s.request.id for s in waiting}),
        }
        if wrong := [name for name, ok in accounts.items() if not ok]:
            raise RuntimeError(f"the scheduler's accounts are off: {', '.join(wrong)}")
