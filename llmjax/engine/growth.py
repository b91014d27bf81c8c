"""What a finished step adds to a sequence: its tokens, those that its grammar then leaves no choice
of, and its end. Pure Python, no jax."""

from __future__ import annotations

from collections.abc import Collection

from ..request import Sequence, SequenceDelta, TokenLogprobs
from .lives import Lives
from .plan import Chunk, Plan
from .stopping import Stop, stop_at


class Growth:
    """Lets sequences grow by what steps have sampled.

    Args:
        lives: where they end.
        in_flight: the steps whose results have not come, as they are at any time.
        several_steps: whether a plan may have several steps of the same decodes.
    """

    def __init__(self, lives: Lives, in_flight: Collection[Plan], *, several_steps: bool):
        self._lives, self._in_flight = lives, in_flight
        self._several_steps = several_steps

    def grow(
        self,
        chunk: Chunk,
        tokens: list[int],
        logprobs: list[TokenLogprobs],
        prompt: list[TokenLogprobs],
    ) -> SequenceDelta:
        """Takes in what one chunk of a step gave; see `Scheduler.commit`.

        Raises:
            StructuredOutputError: a token is not what the sequence is bound to.
        """
        seq = chunk.seq
        seq.num_prompt_logprobs += len(prompt)
        if prompt and seq.num_prompt_logprobs > min(chunk.start + chunk.count, seq.prompt_len - 1):
            raise RuntimeError(f"prompt logprobs of {seq.request.id!r} are told twice")
        delta = SequenceDelta(seq.request.id, seq.index, [], [], prompt)
        delta.num_cached_tokens = seq.num_cached_tokens
        for i in range(chunk.samples):
            if len(tokens) <= i or tokens[i] < 0:
                raise RuntimeError(f"no token for {seq.request.id!r}, whose chunk samples one")
            stop = self._append(seq, tokens[i], delta)
            if logprobs:
                delta.logprobs.append(logprobs[i])
            elif not stop:
                stop = self._jump(seq, delta)
            if not stop:
                self._lives.admission.grown(seq)
                continue
            if self._several_steps:
                # Where a step in flight has several, its row ends before it computes this token.
                seq.num_computed = min(seq.num_computed, len(seq.tokens) - 1)
            self._lives.finish(seq, *stop)
            delta.finish_reason, delta.stop_reason = seq.finish_reason, seq.stop_reason
            break
        return delta

    def _append(self, seq: Sequence, token: int, delta: SequenceDelta) -> Stop | None:
        """A token more, and why it is the last where it is."""
        if seq.constraint is not None:
            seq.constraint.accept(token)
        seq.tokens.append(token)
        self._lives.waiting.charge(seq, 1)
        delta.token_ids.append(token)
        return stop_at(seq, self._lives.max_len[seq])

    def _jump(self, seq: Sequence, delta: SequenceDelta) -> Stop | None:
        """Takes what a grammar leaves no choice of, to be computed without being sampled.

        Where a step in flight computes more of the sequence than its last token, it goes token
        by token: the mask allows no other either.
        """
        constraint = seq.constraint
        if constraint is None or not constraint.forced or seq.in_flight > 1:
            return None
        for chunk in (chunk for plan in self._in_flight for chunk in plan.chunks):
            if chunk.seq is seq and chunk.samples:
                chunk.samples = 0
                seq.num_pending -= 1
        stop = None
        while constraint.forced and not stop:
            stop = self._append(seq, constraint.forced[0], delta)
        return stop
