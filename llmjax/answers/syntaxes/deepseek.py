"""DeepSeek V3, R1 (`function<sep>name` and a block of JSON) and V3.1 (`name<sep>{...}`)."""

from __future__ import annotations

from ..reader import Reader, Reading
from .base import Calls, Frame, Syntax, tell_arguments

_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"


class DeepSeek(Syntax):
    """Reads both; this is how V3.1 writes."""

    markers = (_CALLS,)
    special = (_CALLS, _END_CALLS, _CALL, _END_CALL, _SEP)
    frame = Frame(f"{_CALL}{{name}}{_SEP}", _END_CALL, "", _CALLS, _END_CALLS)

    def read(self, reader: Reader, calls: Calls) -> Reading[None]:
        yield from reader.literal(_CALLS)
        yield from reader.space()
        yield from self._call(reader, calls)
        while True:
            yield from reader.space()
            if (yield from reader.maybe(_END_CALLS)):
                return
            yield from self._call(reader, calls)

    def _call(self, reader: Reader, calls: Calls) -> Reading[None]:
        yield from reader.literal(_CALL)
        name = (yield from reader.until(_SEP)).strip()
        fenced = False
        if name == "function":
            named = yield from reader.attempt(self._fenced_name(reader))
            if isinstance(named, str):
                name, fenced = named, True
        yield from reader.space()
        yield from tell_arguments(reader, calls, name)
        yield from reader.space()
        if fenced:
            yield from reader.literal("```")
        yield from reader.maybe(_END_CALL)
        reader.keep()

    def _fenced_name(self, reader: Reader) -> Reading[str]:
        name = (yield from reader.until("\n")).strip()
        yield from reader.space()
        yield from reader.literal("```json")
        return name


class DeepSeekV3(DeepSeek):
    frame = Frame(
        f"{_CALL}function{_SEP}{{name}}\n```json\n", f"\n```{_END_CALL}", "\n", _CALLS, _END_CALLS
    )
