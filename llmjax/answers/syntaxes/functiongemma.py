"""`<start_function_call>call:name{key:<escape>text<escape>,n:5}<end_function_call>`: FunctionGemma.

Source: https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices
"""

from __future__ import annotations

import re

from ..json_text import MAX_DEPTH, JsonTeller, read_scalar
from ..reader import MalformedError, Reader, Reading
from .base import Calls, Syntax, arguments_teller

_CALL, _END_CALL, _ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"
_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[^:{}\[\],<>\s]*")


class FunctionGemma(Syntax):
    markers = (_CALL,)
    special = (_CALL, _END_CALL, _ESCAPE)

    def read(self, reader: Reader, calls: Calls) -> Reading[None]:
        yield from reader.literal(f"{_CALL}call:")
        name = yield from reader.run(_NAME)
        yield from reader.literal("{")
        json = arguments_teller(calls, name)
        json.say("{")
        yield from self._members(reader, json, 0)
        calls.end()
        yield from reader.literal(_END_CALL)

    def _members(self, reader: Reader, json: JsonTeller, depth: int) -> Reading[None]:
        def member() -> Reading[None]:
            json.key((yield from self._key(reader)))
            yield from reader.literal(":")
            yield from self._value(reader, json, depth + 1)

        yield from json.items(reader, "}", "}", member)

    def _value(self, reader: Reader, json: JsonTeller, depth: int) -> Reading[None]:
        if depth > MAX_DEPTH:
            raise MalformedError

        def item() -> Reading[None]:
            yield from self._value(reader, json, depth + 1)

        if (yield from reader.maybe("{")):
            json.say("{")
            yield from self._members(reader, json, depth)
        elif (yield from reader.maybe("[")):
            json.say("[")
            yield from json.items(reader, "]", "]", item)
        elif (yield from reader.maybe(_ESCAPE)):
            json.say('"')
            yield from reader.tell_until(_ESCAPE, json.characters)
            json.say('"')
        else:
            json.say((yield from read_scalar(reader)))

    def _key(self, reader: Reader) -> Reading[str]:
        if (yield from reader.maybe(_ESCAPE)):
            return (yield from reader.until(_ESCAPE))
        return (yield from reader.run(_KEY))
