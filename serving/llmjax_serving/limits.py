"""What each key may use in a minute and at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .errors import ApiError
from .keys import ApiKey

Clock = Callable[[], float]

ROUNDING = 1e-6
"""So little of a token is missing only because floats are rounded."""


class TokenBucket:
    """Fills at a steady rate up to what it holds, a minute's worth; begins full.

    What is taken may be more than is there: then it is in debt, and takes that long to recover.
    """

    def __init__(self, per_minute: int, clock: Clock):
        self.size = per_minute
        self._clock = clock
        self._level, self._at = float(per_minute), clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.size, self._level + (now - self._at) * self.size / 60)
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        """Until it holds so much; 0 where it does."""
        missing = level - self.level
        return missing * 60 / self.size if missing > ROUNDING else 0.0

    def resize(self, per_minute: int) -> None:
        """What has been taken stays taken."""
        self._level, self.size = self.level + per_minute - self.size, per_minute


class Account:
    """Where a key stands that no limit binds."""

    async def enter(self) -> None:
        """Begins a request, which ends with `leave`.

        Raises:
            ApiError: 429, there is no room for it; it is not counted then.
        """

    def leave(self) -> None:
        """Ends a request."""

    def charge(self, tokens: int) -> None:
        """Tokens that a request has used."""

    async def headers(self) -> dict[str, str]:
        """OpenAI's headers about it."""
        return {}


@dataclass
class Standing(Account):
    """Where one key stands. A limit that is None does not bind.

    Tokens count as they are used: what runs is never cut off, and what comes next waits.

    Attributes:
        requests, tokens: of a minute.
        max_running, running: requests at a time, and at this moment.
    """

    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    max_running: int | None = None
    running: int = 0

    async def enter(self) -> None:
        if self.max_running is not None and self.running >= self.max_running:
            raise refusal(f"{self.running} requests run already (max_concurrent)", 1)
        for what, bucket in self._buckets():
            if wait := bucket.seconds_until(1):
                raise refusal(f"its {bucket.size} {what} per minute are used up", wait)
        if self.requests is not None:
            self.requests.take(1)
        self.running += 1

    def leave(self) -> None:
        self.running -= 1

    def charge(self, tokens: int) -> None:
        if self.tokens is not None:
            self.tokens.take(tokens)

    async def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        for what, bucket in self._buckets():
            left = math.floor(bucket.level + ROUNDING)
            headers |= {
                f"x-ratelimit-limit-{what}": str(bucket.size),
                f"x-ratelimit-remaining-{what}": str(max(0, left)),
                f"x-ratelimit-reset-{what}": duration(bucket.seconds_until(bucket.size)),
            }
        return headers

    def _buckets(self) -> Iterator[tuple[str, TokenBucket]]:
        for what, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                yield what, bucket


class Accounts:
    """Knows where each key stands; here, that no limit binds any."""

    def account(self, key: ApiKey) -> Account:
        return Account()


class Limiter(Accounts):
    """Keeps count of what each key has used."""

    def __init__(self, clock: Clock = time.monotonic):
        self._clock = clock
        self._standings: dict[str, Standing] = {}

    def account(self, key: ApiKey) -> Account:
        return self.standing(key)

    def standing(self, key: ApiKey) -> Standing:
        """Where a key stands, under the limits that it has by now."""
        standing = self._standings.setdefault(key.name, Standing())
        standing.requests = self._bucket(standing.requests, key.requests_per_minute)
        standing.tokens = self._bucket(standing.tokens, key.tokens_per_minute)
        standing.max_running = key.max_concurrent
        return standing

    def _bucket(self, bucket: TokenBucket | None, size: int | None) -> TokenBucket | None:
        if size is None:
            return None
        if bucket is None:
            return TokenBucket(size, self._clock)
        if bucket.size != size:
            bucket.resize(size)
        return bucket


def refusal(reason: str, wait: float) -> ApiError:
    return ApiError(
        429,
        f"the limit of this API key is reached: {reason}; try again in {duration(wait)}",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(max(1, math.ceil(wait)))},
    )


def duration(seconds: float) -> str:
    """As OpenAI's headers write it: 120ms, 1s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
