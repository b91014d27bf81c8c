"""Prompts for make_real.py: a string, or a conversation as a list of messages.

Excerpts of WikiText-2 (CC BY-SA), GSM8K (MIT) and HumanEval (MIT) are read from the folder
of shared data; they end up in the fixtures as text and token ids.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

Prompt = str | list[dict[str, str]]

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("LLMJAX_SHARED", ROOT.parent / "shared"))

PLAIN = [
    "The",
    "Hello",
    "\n",
    "Once upon a time",
    "The capital of France is",
    "The theory of relativity states that",
    "Water boils at a lower temperature in the mountains because",
    "My favourite season is autumn. The leaves turn red and",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "Ingredients:\n- 2 eggs\n- 200 g flour\n- 1 pinch of salt\n\nMethod:\n1.",
    "ROMEO: But, soft! what light through yonder window breaks?\nJULIET:",
    "a a a a a a a a a a a a a a a a",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "   leading spaces,\ttabs\tand   runs   of   blanks  ",
]

CODE = [
    "def fibonacci(n):\n",
    "import numpy as np\n\ndef softmax(x):\n    ",
    '#include <stdio.h>\n\nint main(void) {\n    printf("',
    "SELECT name, COUNT(*) FROM users WHERE",
    '{"name": "Ada", "born": 1815, "children": [',
    "<!DOCTYPE html>\n<html>\n<head>\n  <title>",
    "fn main() {\n    let v: Vec<i32> = (1..10).collect();\n",
    "#!/bin/bash\nset -euo pipefail\nfor f in *.txt; do\n",
]

LANGUAGES = [
    "La vie est belle quand on",
    "Die Hauptstadt von Deutschland ist",
    "Había una vez, en un lugar de la Mancha,",
    "L'acqua è un composto chimico di",
    "Москва — столица",
    "机器学习是人工智能的一个分支",
    "日本の首都は",
    "한국어로 인사하는 방법은",
    "اللغة العربية هي",
    "नमस्ते, आप कैसे हैं?",
    "Η Αθήνα είναι",
    "🦙🚀 emoji first, then words 😁 and",
]

NUMBERS = [
    "1, 2, 3, 4, 5,",
    "3.14159265358979",
    "12 + 34 = 46\n56 + 78 =",
    "2024-01-01, 2024-01-02, 2024-01-03,",
    "1000000 999999 0x1F 1e-9 $4,200.50 75%",
]

SYSTEM = {"role": "system", "content": "You answer in one short sentence."}

CHATS: list[Prompt] = [
    [{"role": "user", "content": "Hi!"}],
    [{"role": "user", "content": "What is gravity?"}],
    [SYSTEM, {"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "user", "content": "Écris un haïku sur la mer."}],
    [
        {"role": "user", "content": "My name is Bob."},
        {"role": "assistant", "content": "Nice to meet you, Bob!"},
        {"role": "user", "content": "What is my name?"},
    ],
]


def wikitext(start: int, stop: int) -> str:
    """Characters of the WikiText-2 test split, without its marks for unknown words."""
    text = (SHARED / "data/wikitext-2/test.txt").read_text(encoding="utf-8")
    return text.replace("<unk> ", "")[start:stop]


def grade_school(first: int, count: int) -> str:
    """Questions of GSM8K with answers, but for the last answer."""
    lines = (SHARED / "data/gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[first : first + count]]
    text = "\n\n".join(f"Question: {r['question']}\nAnswer: {r['answer']}" for r in rows)
    return text[: text.rindex("\nAnswer:") + len("\nAnswer:")]


def human_eval(number: int) -> str:
    with gzip.open(SHARED / "data/humaneval/HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line)["prompt"] for line in file][number]


def smollm2() -> list[Prompt]:
    """50 prompts of 1 to about 300 tokens."""
    excerpts = [
        wikitext(4_000, 4_400),
        wikitext(120_000, 120_900),
        wikitext(600_003, 601_200),
        human_eval(0),
        human_eval(11),
        grade_school(0, 3),
    ]
    return [*PLAIN, *CODE, *LANGUAGES, *NUMBERS, *CHATS, *excerpts]


def gemma() -> list[Prompt]:
    """Text only: the model is a base model without a chat template."""
    return [
        "The",
        "The capital of France is",
        "def fibonacci(n):\n",
        "日本の首都は",
        "12 + 34 = 46\n56 + 78 =",
        wikitext(4_000, 4_400),
    ]


TEXTS = [
    "",
    " ",
    "   ",
    "\n\n \t\n",
    "Hello World!",
    " Hello, y'all! We'LL see IT'S 12345 things.",
    "我想在apple工作1314151天～",
    "🚀 (normal) 😶‍🌫️ (several joined) ✅",
    "нещо на Български, កាន់តែ, ‮עברית",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "for (int i = 0; i < 10; ++i) {\r\n\tx[i] *= 2;\r\n}",
    "naïve café £3.50 ½ ™ ﬁ",
]

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city, as it is <now> & here.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city"],
        },
    },
}
_CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}

CONVERSATIONS: list[dict] = [
    {"messages": CHATS[0]},
    {"messages": CHATS[2]},
    {"messages": CHATS[4], "add_generation_prompt": False},
    {"messages": CHATS[1], "tools": [_WEATHER]},
    {
        "messages": [
            SYSTEM,
            {"role": "user", "content": "Is it warm in Zürich?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": '{"celsius": 21}'},
            {"role": "tool", "content": '{"celsius": 22}'},
        ],
        "tools": [_WEATHER],
    },
]
"""Arguments of `render_chat`."""


def qwen() -> list[Prompt]:
    return [
        "The capital of France is",
        "def fibonacci(n):\n",
        "<|fim_prefix|>def add(a, b):\n    <|fim_suffix|>\n    return total\n<|fim_middle|>",
        "机器学习是人工智能的一个分支",
        human_eval(0),
        [{"role": "user", "content": "Write a Python one-liner that reverses a string."}],
    ]
