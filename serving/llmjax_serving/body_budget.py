"""What the bodies of requests take of memory, each and together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from .errors import RETRY_SECONDS, ApiError


class BodyBudget:
    """Counts bytes of bodies as they come, until their requests have been answered.

    What a client says that its body will have is not counted: saying so takes nothing.

    Args:
        most_each, most_together: bytes.

    Attributes:
        used: bytes that there are.
    """

    def __init__(self, most_each: int, most_together: int):
        self._most_each, self._most_together = most_each, most_together
        self.used = 0

    @contextmanager
    def claim(self) -> Iterator[Claim]:
        """That of one request, which ends with the block."""
        claim = Claim(self)
        try:
            yield claim
        finally:
            self.used -= claim.used

    def check(self, claim: Claim) -> None:
        """Raises what `Claim.add` does."""
        if claim.used > self._most_each:
            raise web.HTTPRequestEntityTooLarge(self._most_each, claim.used)
        if self.used > self._most_together:
            raise ApiError(
                503,
                "the bodies of the requests at hand fill what they may take together, "
                f"{self._most_together} bytes (--max-total-body-bytes); try again later",
                code="bodies_full",
                # The rest of this one is not read.
                headers={"Retry-After": str(RETRY_SECONDS), "Connection": "close"},
            )


class Claim:
    """Attributes:
    used: bytes of one request's body so far.
    """

    def __init__(self, budget: BodyBudget):
        self._budget = budget
        self.used = 0

    def add(self, size: int) -> None:
        """Counts what has come.

        Raises:
            HTTPRequestEntityTooLarge: it is too much for one body.
            ApiError: 503, there is no room beside those of others.
        """
        self.used += size
        self._budget.used += size
        self._budget.check(self)


BUDGET = web.AppKey("body_budget", BodyBudget)
CLAIM = web.RequestKey("body_claim", Claim)
BODY = web.RequestKey("body", bytes)
"""Of a POST request that is no upload."""


async def read_body(request: web.Request, claim: Claim) -> bytes:
    """Raises what `Claim.add` does."""
    pieces = []
    while piece := await request.content.readany():
        claim.add(len(piece))
        pieces.append(piece)
    return b"".join(pieces)
