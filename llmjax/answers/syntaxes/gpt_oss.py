"""`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`: gpt-oss.

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re

from ..reader import MalformedError, Reader, Reading
from .base import Call, Syntax, arguments_of

RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class GptOss(Syntax):
    """Reads what `ChannelParser` leaves of an answer."""

    markers = ("<|channel|>",)

    def read(self, reader: Reader) -> Reading[list[Call]]:
        named = RECIPIENT.search((yield from reader.until("<|message|>")))
        if named is None:
            raise MalformedError
        arguments = arguments_of((yield from reader.json()))
        yield from reader.space()
        yield from reader.literal("<|call|>")
        return [Call(named[1], arguments)]
