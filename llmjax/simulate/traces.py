"""What arrives and when: from a file of one of two formats, or at random.

- CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens: the Azure LLM inference
  traces (Patel et al., Splitwise, 2024). Prompts share nothing but their first token.
- JSON lines with timestamp (ms), input_length, output_length and hash_ids: the Mooncake traces
  (Qin et al., 2024). Each hash id names 512 tokens; equal ids become equal tokens.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError

HASH_TOKENS = 512
"""Tokens that a hash id of Mooncake stands for."""
FIRST = 0
"""All prompts begin with this token, as with a vocabulary's BOS."""
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
        ConfigError: it cannot be read, or is of neither format; says the line.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    lines = text.splitlines()
    first = lines[0] if lines else ""
    if first.replace(" ", "").upper() == "TIMESTAMP,CONTEXTTOKENS,GENERATEDTOKENS":
        arrivals = _read(path, enumerate(csv.reader(lines[1:]), 2), _azure)
    elif first.startswith("{"):
        rows = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        arrivals = _read(path, rows, _mooncake)
    else:
        raise ConfigError(
            f"{path} is not a trace, allowed: CSV with TIMESTAMP,ContextTokens,GeneratedTokens, "
            "or JSON lines with timestamp, input_length, output_length and hash_ids"
        )
    if not arrivals:
        raise ConfigError(f"the trace {path} has no requests")
    arrivals.sort(key=lambda a: a.time)
    start = arrivals[0].time
    return [replace(a, time=a.time - start, index=i) for i, a in enumerate(arrivals)]


def _read(
    path: Path, rows: Iterable[tuple[int, Any]], parse: Callable[[Any], Arrival]
) -> list[Arrival]:
    arrivals = []
    for number, row in rows:
        try:
            arrival = parse(row)
            if arrival.input_len < 1 or arrival.output_len < 1:
                raise ValueError("a length below 1")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(f"line {number} of the trace {path}: {error!r}") from error
        arrivals.append(arrival)
    return arrivals


def _azure(row: list[str]) -> Arrival:
    seconds, _, fraction = row[0].partition(".")
    whole = datetime.fromisoformat(seconds + "+00:00").timestamp()
    return Arrival(whole + float(f"0.{fraction or 0}"), int(row[1]), int(row[2]))


def _mooncake(line: str) -> Arrival:
    row = json.loads(line)
    length, ids = int(row["input_length"]), tuple(map(int, row["hash_ids"]))
    if len(ids) * HASH_TOKENS < length:
        raise ValueError(f"{len(ids)} hash_ids do not cover {length} tokens")
    return Arrival(row["timestamp"] / 1e3, length, int(row["output_length"]), hash_ids=ids)


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


def rate_of(arrivals: Sequence[Arrival]) -> float:
    """Requests a second, on average."""
    last = arrivals[-1].time
    return (len(arrivals) - 1) / last if last else float("inf")


def scaled(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """The same requests, `factor` times as many a second."""
    return [replace(a, time=a.time / factor) for a in arrivals]
