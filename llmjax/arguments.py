"""Prompts, parameters and options as people give them offline: one, or one for each."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, TypeVar

from .checks import shown
from .errors import InvalidRequestError
from .request import RequestOptions

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
Options = RequestOptions | Sequence[RequestOptions] | None
T = TypeVar("T")

PROMPT = "a string, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


def refused(param: str, value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} is {shown(value)}, allowed: {allowed}", param=param)


def for_each(param: str, values: Any, kind: type[T], count: int) -> Sequence[T]:
    """`values`, one of a kind or a list of them, as one for each of `count` prompts."""
    if isinstance(values, kind):
        return [values] * count
    if not is_list(values) or not all(isinstance(value, kind) for value in values):
        raise refused(param, values, f"{kind.__name__}, a list of them, or None")
    if len(values) != count:
        raise InvalidRequestError(
            f"{count} prompts came with {len(values)} {param}, allowed: one, or one for each",
            param=param,
        )
    return values


def each_options(priority: Any, options: Any, count: int) -> Sequence[RequestOptions]:
    """One for each of `count` prompts, with the priorities given beside them."""
    each = for_each(
        "options", RequestOptions() if options is None else options, RequestOptions, count
    )
    if priority is None:
        return each
    priorities = for_each("priority", priority, int, count)
    return [replace(o, priority=p) for o, p in zip(each, priorities, strict=True)]


def is_list(value: Any) -> bool:
    """A list, a tuple, an array: what has items by number and is no text."""
    if isinstance(value, Sequence):
        return not isinstance(value, str | bytes)
    return getattr(value, "ndim", 0) > 0


def as_batch(prompts: Any) -> Sequence[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not is_list(prompts):
        raise refused("prompts", prompts, f"{PROMPT}; or a list of these")
    are_ids = len(prompts) > 0 and all(isinstance(i, Integral) for i in prompts)
    return [prompts] if are_ids or getattr(prompts, "ndim", 0) == 1 else prompts


def as_token_ids(values: Any, param: str, allowed: str) -> list[int]:
    if is_list(values):
        try:
            return [operator.index(i) for i in values]
        except TypeError:
            pass
    raise refused(param, values, allowed)
