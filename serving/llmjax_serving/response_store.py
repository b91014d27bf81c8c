"""Responses that clients may come back to, in memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from .errors import ApiError
from .formatter import JsonObject
from .response_events import ResponseFormatter
from .schema.response_items import Item


@dataclass(eq=False)
class StoredResponse:
    """Attributes:
    owner: who made it; nobody else sees it.
    given: the conversation that it answers, items of earlier responses included.
    is_kept: it is stored when it has ended.
    cancelled: set where it is to end at once.
    ended: set when it has.
    """

    id: str
    owner: str
    given: list[Item]
    formatter: ResponseFormatter
    is_kept: bool
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_running(self) -> bool:
        return self.formatter.status == "in_progress"

    def body(self) -> JsonObject:
        return self.formatter.body()

    def conversation(self) -> list[Item]:
        """All that was said, the answer included."""
        return [*self.given, *self.body()["output"]]

    def cancel(self) -> None:
        if self.is_running:
            self.formatter.cancel()
            self.cancelled.set()


class ResponseStore:
    """The last `capacity` responses; those that run come on top.

    What responses of a conversation have in common is there once.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._running: dict[str, StoredResponse] = {}
        self._ended: OrderedDict[str, StoredResponse] = OrderedDict()

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """Being looked for counts as use."""
        found = self._running.get(response_id) or self._ended.get(response_id)
        if found is None or found.owner != owner:
            return None
        if response_id in self._ended:
            self._ended.move_to_end(response_id)
        return found

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Raises ApiError (404) where there is none, or another's."""
        found = self.find(response_id, owner)
        if found is None:
            message = (
                f"there is no response {response_id[:80]!r}: it was not stored, or no longer is"
            )
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return found

    def items(self, owner: str) -> dict[str, Item]:
        """Every item of the owner's responses, by id."""
        mine = [one for one in self._ended.values() if one.owner == owner]
        return {item["id"]: item for one in mine for item in one.conversation()}

    def begin(self, response: StoredResponse) -> None:
        self._running[response.id] = response

    def end(self, response: StoredResponse) -> None:
        del self._running[response.id]
        response.ended.set()
        if not response.is_kept:
            return
        self._ended[response.id] = response
        while len(self._ended) > self.capacity:
            self._ended.popitem(last=False)

    def delete(self, response: StoredResponse) -> None:
        """Forgets it; where it runs it ends."""
        if response.id in self._running:
            response.is_kept = False
            response.cancel()
        self._ended.pop(response.id, None)
