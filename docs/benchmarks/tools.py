"""Calls of the Berkeley function calling leaderboard, asked of a server that runs.

    llmjax serve MODEL --max-model-len 4096
    python docs/benchmarks/tools.py BFCL_v4_*.json [--limit 100] [--base-url http://...]

Lines of {"id", "question", "function"}; what is accepted is read from `possible_answer/` beside
each file, where it is there. Every question is asked twice: with `tool_choice` "required", whose
arguments must be valid by the function's schema, also where `--max-tokens` cuts them short, and
"auto", where the model may also just answer. For docs/benchmarks/tools.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema

TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
"""What the leaderboard calls JSON's types by Python's names."""
MODES = ("required", "auto")


def as_schema(value: Any) -> Any:
    """A JSON schema from one of the leaderboard's."""
    if isinstance(value, list):
        return [as_schema(one) for one in value]
    if not isinstance(value, dict):
        return value
    schema = {key: as_schema(one) for key, one in value.items()}
    if isinstance(schema.get("type"), str):
        kind = TYPES.get(schema["type"], schema["type"])
        schema = {k: v for k, v in schema.items() if k != "type"} | ({"type": kind} if kind else {})
    return schema


def tools_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    kept = ("name", "description", "parameters")
    return [
        {"type": "function", "function": {key: as_schema(one[key]) for key in kept if key in one}}
        for one in row["function"]
    ]


def is_accepted(call: dict[str, Any], accepted: list[dict[str, Any]]) -> bool:
    """Whether a call is one of those that the leaderboard takes for right.

    Each argument has a list of values; "" among them says that it may be left out.
    """
    arguments = json.loads(call["arguments"])
    for one in accepted:
        for name, values in one.items():
            given = {key: arguments.get(key, "") for key in values}
            known = set(arguments) <= set(values)
            if name == call["name"] and known and all(matches(given[k], values[k]) for k in values):
                return True
    return False


def matches(value: Any, accepted: list[Any]) -> bool:
    def plain(one: Any) -> Any:
        return one.lower().strip() if isinstance(one, str) else one

    return any(plain(value) == plain(one) for one in accepted)


def judge(body: dict[str, Any], tools: list[dict[str, Any]], accepted: list[Any] | None) -> str:
    """What became of a request."""
    choice = body["choices"][0]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
    is_cut = choice["finish_reason"] == "length"
    if not calls:
        return "cut off" if is_cut else "no call"
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for call in calls:
        try:
            jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
        except (KeyError, ValueError, jsonschema.ValidationError) as error:
            if is_cut:
                return "cut off"
            print("INVALID", json.dumps(call)[:300], str(error)[:200], file=sys.stderr)
            return "invalid"
    if is_cut:
        return "cut, valid"
    if accepted is None:
        return "valid"
    return "right" if len(calls) == 1 and is_accepted(calls[0], accepted) else "valid"


async def ask(
    session: aiohttp.ClientSession, args: argparse.Namespace, row: dict[str, Any], mode: str
) -> str:
    tools = tools_of(row)
    body = {
        "messages": row["question"][0],
        "tools": tools,
        "tool_choice": mode,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": args.max_tokens,
    }
    async with session.post(f"{args.base_url}/v1/chat/completions", json=body) as response:
        answer = await response.json()
    if response.status != 200:
        print("REFUSED", row["id"], response.status, str(answer)[:300], file=sys.stderr)
        return "refused"
    return judge(answer, tools, row.get("accepted"))


async def run(args: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Outcomes by mode."""
    gate = asyncio.Semaphore(args.concurrency)
    found: dict[str, Counter[str]] = {mode: Counter() for mode in args.modes}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def both(row: dict[str, Any]) -> None:
            async with gate:
                for mode in args.modes:
                    found[mode][await ask(session, args, row, mode)] += 1

        await asyncio.gather(*map(both, rows))
    return found


def read(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """The rows, with what is accepted; `limit` of them, from all over the file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    answers = path.parent / "possible_answer" / path.name
    if answers.exists():
        lines = map(json.loads, answers.read_text(encoding="utf-8").splitlines())
        accepted = {line["id"]: line["ground_truth"] for line in lines}
        rows = [row | {"accepted": accepted[row["id"]]} for row in rows]
    step = max(1, len(rows) // (limit or len(rows)))
    return rows[::step][:limit]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--limit", type=int, help="questions of each file [all]")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    args = parser.parse_args()
    columns = ("right", "valid", "cut, valid", "no call", "cut off", "invalid", "refused")
    print("| file | tool_choice | asked |", " | ".join(columns), "| seconds |")
    print("| :-- | :-- | --: |", " | ".join("--:" for _ in columns), "| --: |", flush=True)
    failed = 0
    for path in args.files:
        rows, began = read(path, args.limit), time.perf_counter()
        found = asyncio.run(run(args, rows))
        seconds = time.perf_counter() - began
        for mode, counts in found.items():
            cells = [path.stem, mode, len(rows), *(counts[name] for name in columns)]
            print("|", " | ".join(map(str, cells)), f"| {seconds:,.0f} |", flush=True)
            failed += counts["invalid"] * (mode == "required") + counts["refused"]
        required = found.get("required", Counter())
        failed += required["no call"] + required["cut off"]
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
