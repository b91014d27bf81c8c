"""Which stage of a pipeline has which layers, and how long stages wait. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def stage_layers(num_layers: int, stages: int, head: float = 0.0) -> list[range]:
    """Layers of each stage, in order, so that the slowest has least to do.

    Args:
        head: layers that take as long as the head, which the last stage has besides.
    """
    if stages == 1:
        return [range(num_layers)]

    def slowest(last: int) -> float:
        return max(-(-(num_layers - last) // (stages - 1)), last + head)

    last = min(range(1, num_layers - stages + 2), key=lambda last: (slowest(last), -last))
    size, more = divmod(num_layers - last, stages - 1)
    ends = [0]
    for stage in range(stages - 1):
        ends.append(ends[-1] + size + (stage < more))
    return [range(a, b) for a, b in pairwise([*ends, num_layers])]


def stage_of(path: str, layers: Sequence[range]) -> int:
    """The stage that has the parameter at `path` ("layers.0.attn.q.weight").

    The last one needs `embed.weight` as well where it is the head.
    """
    part, _, rest = path.partition(".")
    if part == "layers":
        number = int(rest.partition(".")[0])
        return next(stage for stage, some in enumerate(layers) if number in some)
    return 0 if part == "embed" else len(layers) - 1


def idle_shares(
    steps: Sequence[Sequence[float]], *, in_flight: int, turn: float = 0.0
) -> list[float]:
    """The share of time that each stage waits, from its first step's begin to its last one's end.

    A stage takes steps in order. A step goes to the first stage when the one `in_flight` before it
    has left the last and its tokens are committed.

    Args:
        steps: seconds of each step in each stage.
        turn: seconds from a step's end until the next one is planned and sent off.
    """
    num_stages = len(steps[0])
    free = [0.0] * num_stages
    first: list[float] = [0.0] * num_stages
    ended: list[float] = []
    for number, seconds in enumerate(steps):
        at = ended[number - in_flight] + turn if number >= in_flight else 0.0
        for stage, taken in enumerate(seconds):
            at = max(at, free[stage])
            if not number:
                first[stage] = at
            at += taken
            free[stage] = at
        ended.append(at)
    busy = [sum(seconds[stage] for seconds in steps) for stage in range(num_stages)]
    return [1 - b / (end - begin) for b, end, begin in zip(busy, free, first, strict=True)]
