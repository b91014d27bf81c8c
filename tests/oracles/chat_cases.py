"""Conversations that chat templates are rendered with."""

from __future__ import annotations

from typing import Any

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

Messages = list[dict[str, Any]]


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


USER = [say("user", '  What is 2+2? é 中 "<&>" \n')]
SYSTEM = [say("system", "Be brief."), *USER]
TURNS = [*USER, say("assistant", " 4. "), say("user", "And 3+3?")]
TWICE = [say("user", "One"), say("user", "Two")]
PREFILL = [*USER, say("assistant", "The answer is ")]
PREFILL_PARTS = [*USER, say("assistant", [{"type": "text", "text": "It is"}])]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für eine Stadt — now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
TOOL_TURNS = [
    say("user", "Weather in Zürich?"),
    say("assistant", None, tool_calls=[CALL]),
    say("tool", "sunny"),
    say("user", "And tomorrow?"),
]
MIXED = [say("user", "a"), say("skip", "b"), say("assistant", "c"), say("stop", "d"), *USER]

PROMPT = {"add_generation_prompt": True}
CONTINUE = {"continue_final_message": True}

CASES: list[tuple[str, Messages, dict[str, Any]]] = [
    (template, messages, arguments)
    for template in ("smollm2", "qwen25", "llama3", "gemma", "mistral")
    for messages, arguments in (
        (USER, PROMPT),
        (SYSTEM, PROMPT),
        (TURNS, {}),
        (TURNS, PROMPT),
        (TWICE, PROMPT),
        (PREFILL, CONTINUE),
    )
] + [
    ("qwen25", USER, {**PROMPT, "tools": [TOOL]}),
    ("qwen25", TOOL_TURNS, {**PROMPT, "tools": [TOOL, TOOL]}),
    ("mistral", TOOL_TURNS, {"tools": [TOOL]}),
    ("dialect", MIXED, {**PROMPT, "custom": "x", "documents": [{"title": "T", "text": "t"}]}),
    ("dialect", MIXED, {"tools": [TOOL], "eos_token": "<end>"}),
    ("dialect", PREFILL_PARTS, CONTINUE),
    ("dialect", [say("user", "a", name=None)], {}),
]
