"""What the answer of a chat model is made of: reasoning, content, calls of functions."""

from .plan import AnswerPlan, ChatFormat, plan_answer
from .tools import Tool, ToolUse, read_tools

__all__ = ["AnswerPlan", "ChatFormat", "Tool", "ToolUse", "plan_answer", "read_tools"]
