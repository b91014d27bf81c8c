"""What an assistant says, taken apart: text, reasoning, calls of functions. No jax."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call, or a piece of one whose message is streamed: all pieces have its id and name.

    Attributes:
        arguments: a JSON object as text, as in OpenAI's API; of a piece, what is new of it.
        begins: it is the first piece, or all.
        ends: nothing more comes, and the arguments are whole; False for good where the call was cut
            off, or its arguments went wrong.
    """

    id: str
    name: str
    arguments: str
    begins: bool = True
    ends: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The call as messages carry it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class ChatMessage:
    """An assistant's message, or what is new of one that is streamed.

    Attributes:
        reasoning: what it thought before it answered.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def add(self, news: ChatMessage) -> None:
        """Goes on by what is new; pieces of a call become one."""
        self.content += news.content
        self.reasoning += news.reasoning
        for piece in news.tool_calls:
            before = self.tool_calls[-1] if self.tool_calls else None
            if before is None or before.id != piece.id:
                self.tool_calls.append(piece)
            else:
                text = before.arguments + piece.arguments
                self.tool_calls[-1] = replace(before, arguments=text, ends=piece.ends)

    def as_dict(self) -> dict[str, Any]:
        """The message as the next turn's `messages` carry it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return message
