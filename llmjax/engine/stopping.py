"""When a sequence ends: the length it can reach, and the tokens that stop it."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import InvalidRequestError
from ..request import FinishReason, Sequence


class Stop(NamedTuple):
    """Why a sequence ended; `stop_reason` is the stop token, None for an end-of-sequence."""

    finish_reason: FinishReason
    stop_reason: int | None = None


def longest(seq: Sequence, *, max_model_len: int, num_blocks: int, block_size: int) -> int:
    """Tokens, prompt and output, at which `seq` ends with "length".

    The last of them needs no place in a page, as nothing attends to it. Without max_tokens a
    sequence may also end where it alone has filled the pool of `num_blocks` pages.

    Raises:
        InvalidRequestError: the prompt is empty or leaves no room for output in
            `max_model_len`; or prompt and max_tokens need more pages than the pool has.
    """
    prompt, max_tokens = seq.prompt_len, seq.request.params.max_tokens
    if not prompt:
        raise InvalidRequestError("the prompt is empty, allowed: 1 token or more", param="prompt")
    if prompt >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {prompt} tokens, allowed: up to {max_model_len - 1}, as "
            f"max_model_len is {max_model_len} and the output takes at least one",
            param="prompt",
            code="context_length_exceeded",
        )
    room = num_blocks * block_size
    wanted = max_model_len if max_tokens is None else min(max_model_len, prompt + max_tokens)
    stored = prompt if max_tokens is None else wanted - 1
    if stored > room:
        raise InvalidRequestError(
            f"a prompt of {prompt} tokens with max_tokens {max_tokens} needs "
            f"{-(-stored // block_size)} pages of {block_size} tokens, allowed: up to "
            f"{num_blocks}, all that the cache has",
            param="prompt" if prompt > room else "max_tokens",
        )
    return min(wanted, room + 1)


def stop_at(seq: Sequence, max_len: int) -> Stop | None:
    """Why the last token of `seq` ends it, or None.

    A token stops only where `min_tokens` others precede it in the output; it stays part of
    the output.
    """
    request, token = seq.request, seq.tokens[-1]
    params = request.params
    if seq.output_len > params.min_tokens:
        if token in request.eos_token_ids and not params.ignore_eos:
            return Stop(FinishReason.STOP)
        if token in (params.stop_token_ids or ()):
            return Stop(FinishReason.STOP, token)
    return Stop(FinishReason.LENGTH) if len(seq.tokens) >= max_len else None
