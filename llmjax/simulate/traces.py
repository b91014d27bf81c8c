"""What arrives and when: from a file of one of two formats, or at random.

- CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens: the Azure LLM inference
  traces (Patel et al., Splitwise, 2024). Prompts share nothing but their first token.
- JSON lines with timestamp (ms), input_length, output_length and hash_ids: the Mooncake traces
  (Qin et al., 2024). Each hash id names 512 tokens; equal ids become equal tokens.
"""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ..checks import cut, shown
from ..errors import ConfigError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Columns."""
HASH_TOKENS = 512
"""Tokens that a hash id of Mooncake stands for."""
FIRST = 0
"""All prompts begin with this token, as with a vocabulary's BOS."""
MOST_TOKENS = 10**9
"""Of a prompt or an output."""
MOST_MS = 10**14
"""Some 3,000 years: a timestamp since 1970 keeps its milliseconds as a float."""
MOST_YEARS = 10
MOST_SECONDS = MOST_YEARS * 365 * 86_400
"""From the first request to the last: a clock that went on would lose the length of a step."""
_DIGITS = re.compile(r"[0-9]{1,18}")
_NAMES = 1 << 20
"""Ids from here on name a prompt or a block; those below are filler."""
_FILLER = list(range(1, 1 + HASH_TOKENS))


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        time: seconds after the first.
        hash_ids: of each 512 tokens of the prompt; none: all its own.
        index: which request it is.
    """

    time: float
    input_len: int
    output_len: int
    index: int = 0
    hash_ids: tuple[int, ...] = ()

    def prompt(self) -> list[int]:
        """Token ids: equal where hash ids say so, and parting from others' at the first own one."""
        if not self.hash_ids:
            whole, rest = divmod(max(0, self.input_len - 2), HASH_TOKENS)
            tokens = [FIRST, _NAMES + self.index, *(_FILLER * whole), *_FILLER[:rest]]
        else:
            tokens = []
            for name in self.hash_ids:
                tokens.append(_NAMES + name)
                tokens += _FILLER[1:]
        return tokens[: self.input_len]


def read_trace(path: Path) -> list[Arrival]:
    """The arrivals of a trace file, in order of time.

    Raises:
        ConfigError: it cannot be read, or is of neither format; says the line and the field.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    if lines[0].replace(" ", "").upper() == ",".join(AZURE).upper():
        arrivals = _read(path, list(enumerate(lines, 1))[1:], _azure)
    elif lines[0].startswith("{"):
        arrivals = _read(path, enumerate(lines, 1), _mooncake)
    else:
        raise ConfigError(
            f"{path} is not a trace, allowed: CSV with {','.join(AZURE)}, or JSON lines with "
            "timestamp, input_length, output_length and hash_ids"
        )
    if not arrivals:
        raise ConfigError(f"the trace {path} has no requests")
    arrivals.sort(key=lambda a: a.time)
    start = arrivals[0].time
    return [replace(a, time=a.time - start, index=i) for i, a in enumerate(arrivals)]


def _read(
    path: Path, lines: Iterable[tuple[int, str]], parse: Callable[[str], Arrival]
) -> list[Arrival]:
    arrivals: list[Arrival] = []
    first, last = math.inf, -math.inf
    for number, line in lines:
        if not line.strip():
            continue
        try:
            arrival = parse(line)
            first, last = min(first, arrival.time), max(last, arrival.time)
            if last - first > MOST_SECONDS:
                raise ValueError(
                    f"timestamp is {last - first:.0f} s from another line's, allowed: up to "
                    f"{MOST_SECONDS:,}, {MOST_YEARS} years"
                )
        except ValueError as error:
            raise ConfigError(f"line {number} of the trace {path}: {error}") from error
        arrivals.append(arrival)
    return arrivals


def _azure(line: str) -> Arrival:
    try:
        (columns,) = csv.reader([line])
    except csv.Error as error:
        raise ValueError(f"is no CSV ({error})") from error
    if len(columns) > len(AZURE):
        raise ValueError(f"has {len(columns)} columns, allowed: {len(AZURE)}, {', '.join(AZURE)}")
    row: dict[str, Any] = dict(zip(AZURE, map(str.strip, columns), strict=False))
    time = _date(_field(row, "TIMESTAMP"))
    for name in AZURE[1:]:
        # What is no number is told of as it stands.
        if name in row and _DIGITS.fullmatch(row[name]):
            row[name] = int(row[name])
    return Arrival(time, _tokens(row, "ContextTokens"), _tokens(row, "GeneratedTokens"))


def _date(text: str) -> float:
    """Seconds since 1970."""
    # Of digits there may be seven; the traces of 2024 say that they are in UTC.
    local, _, offset = text.partition("+")
    seconds, _, fraction = local.partition(".")
    try:
        whole = datetime.fromisoformat(f"{seconds}+{offset or '00:00'}").timestamp()
    except ValueError:
        whole = math.nan
    _require(
        math.isfinite(whole) and _DIGITS.fullmatch(fraction or "0") is not None,
        "TIMESTAMP",
        text,
        "a date and time such as 2023-11-16 18:15:46.6805900",
    )
    return whole + float(f"0.{fraction or 0}")


def _mooncake(line: str) -> Arrival:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"is {cut(line.strip())}, allowed: a JSON object")
    time, length = _field(row, "timestamp"), _tokens(row, "input_length")
    _require(
        type(time) in (int, float) and 0 <= time <= MOST_MS,
        "timestamp",
        time,
        f"milliseconds, 0 to {MOST_MS:,}",
    )
    ids, needed = _field(row, "hash_ids"), math.ceil(length / HASH_TOKENS)
    _require(
        isinstance(ids, list) and all(type(name) is int and name >= 0 for name in ids),
        "hash_ids",
        ids,
        "a list of integers from 0",
    )
    if len(ids) < needed:
        raise ValueError(
            f"hash_ids has {len(ids)} ids, allowed for input_length {length}: {needed} or more, "
            f"one for each {HASH_TOKENS} tokens"
        )
    return Arrival(time / 1e3, length, _tokens(row, "output_length"), hash_ids=tuple(ids))


def _field(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(f"lacks {name}")
    return row[name]


def _tokens(row: dict[str, Any], name: str) -> int:
    value = _field(row, name)
    allowed = f"an integer from 1 to {MOST_TOKENS:,}"
    _require(type(value) is int and 1 <= value <= MOST_TOKENS, name, value, allowed)
    return value


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {shown(value)}, allowed: {allowed}")


def poisson(
    count: int, rate: float, input_len: int, output_len: int, *, spread: float, seed: int
) -> list[Arrival]:
    """Requests at random.

    Args:
        rate: requests a second.
        input_len, output_len: means of the lengths.
        spread: lengths are uniform within this share of their means, both ways.
    """
    rng = random.Random(seed)

    def length(mean: int) -> int:
        low, high = max(1, round(mean * (1 - spread))), max(1, round(mean * (1 + spread)))
        return rng.randint(low, high)

    time, arrivals = 0.0, []
    for index in range(count):
        arrivals.append(Arrival(time, length(input_len), length(output_len), index))
        time += rng.expovariate(rate)
    return arrivals


def rate_of(arrivals: Sequence[Arrival]) -> float | None:
    """Requests a second, on average; None where all arrive at once."""
    last = arrivals[-1].time
    return (len(arrivals) - 1) / last if last else None


def scaled(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """The same requests, `factor` times as many a second."""
    return [replace(a, time=a.time / factor) for a in arrivals]
