"""Texts as models write them, and what they mean."""

from __future__ import annotations

from typing import Any

Calls = list[tuple[str, dict[str, Any]]]

PARIS = ("get_weather", {"city": "Paris"})
ADD = ("add", {"a": 1, "b": -2.5, "deep": {"x": [True, None, "}"]}})
NONE = ("now", {})
NAMES = {"get_weather", "add", "now", "write"}
TRICKY = ("write", {"text": 'a "quote", a brace }, a tag </tool_call>\n\\ and é ☃'})
ADD_JSON = '{"a": 1, "b": -2.5, "deep": {"x": [true, null, "}"]}}'
TRICKY_JSON = r'{"text": "a \"quote\", a brace }, a tag </tool_call>\n\\ and é \u2603"}'

_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"


def deepseek(form: str, *calls: tuple[str, str]) -> str:
    inner = "\n".join(form.format(*call) for call in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CASES: list[tuple[str, str, str, Calls]] = [
    ("hermes", hermes("get_weather", '{"city": "Paris"}'), "", [PARIS]),
    (
        "hermes",
        f"Let me see.\n{hermes('add', ADD_JSON)}\n{hermes('now', '{}')}\nDone.",
        "Let me see.\nDone.",
        [ADD, NONE],
    ),
    ("hermes", f" {hermes('write', TRICKY_JSON)}", "", [TRICKY]),
    ("hermes", f'So:\n```json\n{{"name": "add", "arguments": {ADD_JSON}}}\n```', "So:", [ADD]),
    ("hermes", '<tool_call>{"arguments": "{}", "name": "now"}</tool_call>', "", [NONE]),
    ("hermes", '<tool_call>{"name": "write", "arguments": {"text": "a\nb"}}</tool_call>', "",
     [("write", {"text": "a\nb"})]),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "add", "parameters": {ADD_JSON}}}; '
        '{"name": "now", "parameters": {}}',
        "",
        [ADD, NONE],
    ),
    ("mistral", f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADD_JSON}}}, '
     '{"name": "now", "arguments": {}}]', "", [ADD, NONE]),
    ("mistral", 'Ok.[TOOL_CALLS]now{}[TOOL_CALLS]get_weather{"city": "Paris"}', "Ok.",
     [NONE, PARIS]),
    ("mistral_args", f"[TOOL_CALLS]write[CALL_ID]abcDEF123[ARGS]{TRICKY_JSON}", "", [TRICKY]),
    (
        "pythonic",
        "[get_weather(city='Paris'), now( ), "
        "add(a=1, b=-2.5, deep={'x': [True, None, \"}\"]})]",
        "",
        [PARIS, NONE, ADD],
    ),
    ("pythonic", r"""<|python_start|>[write(text="a \"quote\", a brace }, a tag </tool_call>\n\\ """
     r"""and \xe9 \u2603")]<|python_end|>""", "", [TRICKY]),
    ("deepseek_v3", deepseek(_V3, ("add", ADD_JSON), ("now", "{}")), "", [ADD, NONE]),
    ("deepseek_v3", "Hm." + deepseek(_V31, ("write", TRICKY_JSON), ("now", "{}")), "Hm.",
     [TRICKY, NONE]),
    ("deepseek_v31", deepseek(_V31, ("get_weather", '{"city": "Paris"}')), "", [PARIS]),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>"
        "<start_function_call>call:add{a:1,b:-2.5,deep:{x:[true,null,<escape>}<escape>]}}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>",
        "",
        [PARIS, ADD, NONE],
    ),
    (
        "gpt_oss",
        f"Hm.<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ADD_JSON}<|call|>",
        "Hm.",
        [ADD],
    ),
    ("json", f'[{{"name": "add", "arguments": {ADD_JSON}}}, {{"name": "now", "parameters": {{}}}}]',
     "", [ADD, NONE]),
    ("json", f'\n{{"name": "write", "arguments": {TRICKY_JSON}}}\n', "", [TRICKY]),
]  # fmt: skip
"""(parser, text, content, calls)"""

NO_CALLS = [
    ("hermes", "no call"),
    ("hermes", '```json\n{"name": "unknown", "arguments": {}}\n```'),
    ("hermes", 'As in\n```json\n{"name": "now"}\n```\nor so.'),
    ("hermes", "a <tool_call"),
    ("hermes", "<tool_call>\n"),
    ("hermes", "<tool_call>{'name': 'now', 'arguments': {}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": ' + "[" * 5000),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": NaN}, "name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1e999}, "name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{"}</tool_call>'),
    ("llama3_json", '{"name": "Bob", "parameters": {}}'),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", 'It is {"name": "now", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "[TOOL_CALLS]now"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[now(]"),
    ("pythonic", "[now(a="),
    ("pythonic", "[now(a=__import__('os'))]"),
    ("pythonic", "[unknown(a=1)]"),
    ("pythonic", "[now is the time]"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"),
    ("functiongemma", "<start_function_call>call:now"),
    ("functiongemma", "<start_function_call>call:unknown{a:1}<end_function_call>"),
    ("functiongemma", "<start_function_call>call:now[1]<end_function_call>"),
    ("gpt_oss", "<|channel|>final<|message|>{}<|call|>"),
    ("json", "[]"),
    ("json", "[now()]"),
]
"""(parser, text that is content to the letter)"""

FLAWED: list[tuple[str, str, str, str, bool]] = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", '{"a": 1', False),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x', "", '{"a": "x', False),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x\\u00', "\\u00", '{"a": "x', False),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}', "", "{}", True),
    ("hermes", '<tool_call>{"name": "now", "arguments": {},}</tool_call> ok', ",}</tool_call> ok",
     "{}", True),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_result>', "</tool_result>",
     "{}", True),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}', '": NaN}}', '{"a', False),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1e999]}}', "1e999]}}", '{"a": [',
     False),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\ud800"}}', '\\ud800"}}',
     '{"a": "', False),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a":\u00a01}}', '":\u00a01}}', '{"a',
     False),
    ("llama3_json", '{"name": "now", "parameters": {}}; {"name": "Bob", "parameters": {}}',
     '; {"name": "Bob", "parameters": {}}', "{}", True),
    ("json", '[{"name": "now", "arguments": {}}, 3]', ", 3]", "{}", True),
    ("gpt_oss", "<|channel|>commentary to=functions.now<|message|>{}", "", "{}", True),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{'",
     "'", "{", False),
    ("pythonic", "[now(a='", "", '{"a": "', False),
    ("pythonic", r"[now(a='x\u12')]", r"\u12')]", '{"a": "x', False),
    ("pythonic", r"[now(a='x\ud800')]", r"\ud800')]", '{"a": "x', False),
    ("pythonic", r"[now(a='x\x1", r"\x1", '{"a": "x', False),
    ("pythonic", "[now(a=1, b={'c': [2, oops]})]", ", oops]})]", '{"a": 1, "b": {"c": [2', False),
    ("pythonic", "[now(a=1, b=1e999)]", ", b=1e999)]", '{"a": 1', False),
    ("pythonic", "[now(), unknown()]", ", unknown()]", "{}", True),
    ("pythonic", "[now()", "", "{}", True),
    ("functiongemma", "<start_function_call>call:now{a:<escape>x}<end_function_call>", "",
     '{"a": "x}<end_function_call>', False),
    ("functiongemma", "<start_function_call>call:now{a:<escape>x<esc", "<esc", '{"a": "x', False),
    ("functiongemma", "<start_function_call>call:now{a:[1,oops]}<end_function_call>",
     ",oops]}<end_function_call>", '{"a": [1', False),
    ("functiongemma", "<start_function_call>call:now{a:oops}", "a:oops}", "{", False),
    ("functiongemma", "<start_function_call>call:now{}<end", "<end", "{}", True),
]  # fmt: skip
"""(parser, text of one call that goes wrong, content, its arguments, whether these are whole)"""
