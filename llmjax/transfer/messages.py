"""What connectors say to each other, as frames, and what of it is believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import PrefillMismatchError, TransferError
from .connector import PART_PAGES, PROTOCOL, Cancel, Failure, Job, Part, Place, Result, Terms
from .frames import Frames

Frame = tuple[dict[str, Any], list[Any]]
TOKENS = np.dtype("<i4")
HELLO_SECONDS = 10.0


def frames_of(message: Job | Cancel | Result) -> Iterator[Frame]:
    """A message as it travels; arrays are fetched from their device here."""
    match message:
        case Job():
            head = {"type": "job", "id": message.id, "start": message.start, "salt": message.salt}
            yield head, [np.asarray(message.token_ids, TOKENS)]
        case Cancel():
            yield {"type": "cancel", "id": message.job_id}, []
        case Failure():
            yield {"type": "failure", "id": message.job_id, "reason": message.reason}, []
        case _:
            head = {"type": "pages", "id": message.job_id, "cached": message.num_cached}
            parts = message.parts or [Part([], [])]
            for i, part in enumerate(parts, 1):
                count = len(part.places)
                rows = [np.asarray(row)[:count] for row in part.rows]
                yield {**head, "places": part.places, "last": i == len(parts)}, rows


def greet(frames: Frames, terms: Terms, who: str) -> int:
    """Tells the other side our terms, and compares its own.

    Returns:
        The most tokens of a prompt that the other side takes.

    Raises:
        OSError, TransferError: there is no answer, or none that makes sense.
        PrefillMismatchError: the terms differ.
    """
    frames.sock.settimeout(HELLO_SECONDS)
    hello = {"protocol": PROTOCOL, "terms": terms.values, "most_tokens": terms.most_tokens}
    frames.send({"type": "hello", **hello})
    head, _ = frames.receive()
    theirs, protocol = head.get("terms"), head.get("protocol")
    if head.get("type") != "hello":
        raise TransferError(f"{who} does not say hello")
    if protocol != PROTOCOL:
        raise PrefillMismatchError(who, "protocol", PROTOCOL, protocol)
    if not isinstance(theirs, dict):
        raise TransferError(f"{who} says hello without its terms")
    terms.check(theirs, who)
    frames.sock.settimeout(None)
    return _integer(head, "most_tokens")


def read_request(head: Mapping[str, Any], body: memoryview) -> Job | Cancel:
    """What a worker is told. Raises TransferError where it makes no sense."""
    kind, job_id = head.get("type"), _integer(head, "id")
    if kind == "cancel":
        return Cancel(job_id)
    salt = head.get("salt")
    if kind != "job" or not (salt is None or isinstance(salt, str)) or len(body) % 4:
        raise TransferError(f"a frame of the type {kind!r} that a worker does not understand")
    tokens = np.frombuffer(body, TOKENS).tolist()
    return Job(job_id, tokens, _integer(head, "start"), salt)


def read_failure(head: Mapping[str, Any]) -> Failure:
    return Failure(_integer(head, "id"), str(head.get("reason"))[:500])


def read_part(head: Mapping[str, Any], body: memoryview, terms: Terms) -> tuple[Part, int, bool]:
    """Some pages, the tokens that the worker had, and whether these are the last.

    Raises:
        TransferError: it makes no sense.
    """
    listed, is_last = head.get("places"), head.get("last")
    if not isinstance(listed, list) or len(listed) > PART_PAGES or not isinstance(is_last, bool):
        raise TransferError("a frame of pages without a proper list of them")
    places = []
    for place in listed:
        if not (isinstance(place, list) and len(place) == 2 and all(map(_is_count, place))):
            raise TransferError(f"a page has the place {place!r}, allowed: [group, block]")
        places.append(Place(*place))
    if len(body) != len(places) * terms.page_bytes:
        raise TransferError(
            f"{len(places)} pages came as {len(body)} bytes, allowed: {terms.page_bytes} each"
        )
    rows, at = [], 0
    for shape, dtype in terms.arrays:
        row = np.frombuffer(body, dtype, len(places) * int(np.prod(shape)), at)
        rows.append(row.reshape(len(places), *shape))
        at += row.nbytes
    return Part(places, rows), _integer(head, "cached"), is_last


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _integer(head: Mapping[str, Any], name: str) -> int:
    value = head.get(name)
    if not _is_count(value):
        raise TransferError(f"{name} of a frame is {value!r}, allowed: an integer from 0")
    assert isinstance(value, int)
    return value
