"""`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and since 2025 `[TOOL_CALLS]name[ARGS]{...}`.

The tokens are those of mistral-common's tokenizers, versions 3 to 13.
"""

from __future__ import annotations

import re
import secrets
import string

from ..reader import MalformedError, Reader, Reading
from .base import Calls, Frame, Syntax, tell_arguments, tell_calls

_NAME = re.compile(r"[\w.-]*")
_CALL_ID = re.compile(r"[A-Za-z0-9]*")


class Mistral(Syntax):
    markers = ("[TOOL_CALLS]",)
    special = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    frame = Frame('{"name": "{name}", "arguments": ', "}", ", ", "[TOOL_CALLS] [", "]")

    def read(self, reader: Reader, calls: Calls) -> Reading[None]:
        yield from reader.literal("[TOOL_CALLS]")
        yield from reader.space()
        first = yield from reader.peek()
        if first in ("[", "{"):
            yield from tell_calls(reader, calls)
            return
        name = yield from reader.run(_NAME)
        if not name:
            raise MalformedError
        if (yield from reader.maybe("[CALL_ID]")):
            yield from reader.run(_CALL_ID)
        yield from reader.maybe("[ARGS]")
        yield from reader.space()
        yield from tell_arguments(reader, calls, name)

    def new_id(self) -> str:
        """Its chat templates take ids of nine letters and digits, and no others."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class MistralArgs(Mistral):
    """Of models whose chat template writes `[ARGS]`."""

    frame = Frame("[TOOL_CALLS]{name}[ARGS]", "", "")
    tagged = True
