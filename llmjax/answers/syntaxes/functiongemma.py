"""`<start_function_call>call:name{key:<escape>text<escape>,n:5}<end_function_call>`: FunctionGemma.

Source: https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices
"""

from __future__ import annotations

import re
from typing import Any

from ..json_text import MAX_DEPTH, load_json
from ..reader import MalformedError, Reader, Reading
from .base import Call, Calls, Syntax

_CALL, _END_CALL, _ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"
_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[^:{}\[\],<>\s]*")
_SCALAR = re.compile(r"[-+.\w]*")


class FunctionGemma(Syntax):
    markers = (_CALL,)
    special = (_CALL, _END_CALL, _ESCAPE)

    def read(self, reader: Reader, calls: Calls) -> Reading[None]:
        yield from reader.literal(f"{_CALL}call:")
        name = yield from reader.run(_NAME)
        arguments = yield from self._value(reader, 0)
        if not isinstance(arguments, dict):
            raise MalformedError
        yield from reader.literal(_END_CALL)
        calls.tell([Call(name, arguments)])

    def _value(self, reader: Reader, depth: int) -> Reading[Any]:
        if depth > MAX_DEPTH:
            raise MalformedError
        members: dict[str, Any] = {}
        items: list[Any] = []

        def member() -> Reading[None]:
            key = yield from self._key(reader)
            yield from reader.literal(":")
            members[key] = yield from self._value(reader, depth + 1)

        def item() -> Reading[None]:
            items.append((yield from self._value(reader, depth + 1)))

        if (yield from reader.maybe("{")):
            yield from reader.items("}", member)
            return members
        if (yield from reader.maybe("[")):
            yield from reader.items("]", item)
            return items
        if (yield from reader.maybe(_ESCAPE)):
            return (yield from reader.until(_ESCAPE))
        return load_json((yield from reader.run(_SCALAR)))

    def _key(self, reader: Reader) -> Reading[str]:
        if (yield from reader.maybe(_ESCAPE)):
            return (yield from reader.until(_ESCAPE))
        return (yield from reader.run(_KEY))
