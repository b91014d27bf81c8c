"""`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`: gpt-oss.

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re

from ..reader import MalformedError, Reader, Reading
from .base import Calls, Syntax, tell_arguments

RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class GptOss(Syntax):
    """Reads what `ChannelParser` leaves of an answer."""

    markers = ("<|channel|>",)

    def read(self, reader: Reader, calls: Calls) -> Reading[None]:
        named = RECIPIENT.search((yield from reader.until("<|message|>")))
        if named is None:
            raise MalformedError
        yield from reader.space()
        yield from tell_arguments(reader, calls, named[1])
        yield from reader.space()
        yield from reader.literal("<|call|>")
