"""When a sequence ends."""

from __future__ import annotations

from typing import NamedTuple

from ..request import FinishReason, Sequence


class Stop(NamedTuple):
    """Why a sequence ended; `stop_reason` is the stop token, None for an end-of-sequence."""

    finish_reason: FinishReason
    stop_reason: int | None = None


def stop_at(seq: Sequence, max_len: int) -> Stop | None:
    """Why the last token of `seq` ends it, or None.

    A token stops only where `min_tokens` others precede it in the output; it stays part of
    the output.
    """
    request, token = seq.request, seq.tokens[-1]
    params = request.params
    # Hardly any token stops: what is looked up for each of them comes first.
    is_eos = token in request.eos_token_ids and not params.ignore_eos
    if (is_eos or token in (params.stop_token_ids or ())) and seq.output_len > params.min_tokens:
        return Stop(FinishReason.STOP, None if is_eos else token)
    if seq.constraint is not None and seq.constraint.is_complete:
        return Stop(FinishReason.LENGTH if seq.constraint.is_cut_short else FinishReason.STOP)
    return Stop(FinishReason.LENGTH) if len(seq.tokens) >= max_len else None
