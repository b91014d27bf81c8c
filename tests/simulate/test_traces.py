"""Trace files and random loads."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path

import pytest

from llmjax.errors import ConfigError
from llmjax.simulate.traces import HASH_TOKENS, Arrival, poisson, rate_of, read_trace, scaled

HERE = Path(__file__).parent


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def test_azure_rows_are_read_as_they_stand():
    arrivals = read_trace(HERE / "azure.csv")
    assert len(arrivals) == 40
    assert (arrivals[0].time, arrivals[0].input_len, arrivals[0].output_len) == (0.0, 374, 44)
    # 18:15:50.9951690 less 18:15:46.6805900
    assert arrivals[1].time == pytest.approx(4.314579, abs=1e-6)
    assert (arrivals[1].input_len, arrivals[1].output_len) == (396, 109)
    assert [a.index for a in arrivals] == list(range(40))


def test_azure_prompts_have_nothing_in_common_but_their_first_token():
    prompts = [a.prompt() for a in read_trace(HERE / "azure.csv")]
    assert [len(p) for p in prompts] == [a.input_len for a in read_trace(HERE / "azure.csv")]
    assert {shared(a, b) for a, b in combinations(prompts, 2)} == {1}


def test_mooncake_prompts_share_the_blocks_of_equal_hash_ids():
    arrivals = read_trace(HERE / "mooncake.jsonl")
    rows = [json.loads(line) for line in (HERE / "mooncake.jsonl").read_text().splitlines()]
    assert [a.time for a in arrivals] == [
        (r["timestamp"] - rows[0]["timestamp"]) / 1e3 for r in rows
    ]
    blocks = set()
    for (a, one), (b, other) in combinations(zip(arrivals, rows, strict=True), 2):
        same = shared(one["hash_ids"], other["hash_ids"])
        least = min(a.input_len, b.input_len)
        assert shared(a.prompt(), b.prompt()) == min(same * HASH_TOKENS, least)
        blocks.add(same)
    assert max(blocks) >= 3
    assert all(len(a.prompt()) == a.input_len for a in arrivals)


@pytest.mark.parametrize("length", [1, 2, 3, 512, 514, 515, 5000])
def test_a_prompt_has_its_length(length):
    assert len(Arrival(0.0, length, 1, index=7).prompt()) == length


def test_rates_are_scaled():
    arrivals = read_trace(HERE / "azure.csv")
    faster = scaled(arrivals, 3.0)
    assert rate_of(faster) == pytest.approx(3 * rate_of(arrivals))
    assert [(a.input_len, a.output_len) for a in faster] == [
        (a.input_len, a.output_len) for a in arrivals
    ]


def test_random_loads_have_the_means_they_were_asked_for():
    arrivals = poisson(4000, 20.0, 300, 40, spread=0.5, seed=3)
    assert rate_of(arrivals) == pytest.approx(20, rel=0.05)
    assert sum(a.input_len for a in arrivals) / 4000 == pytest.approx(300, rel=0.02)
    assert {a.output_len for a in arrivals} == set(range(20, 61))
    assert arrivals == poisson(4000, 20.0, 300, 40, spread=0.5, seed=3)
    assert arrivals != poisson(4000, 20.0, 300, 40, spread=0.5, seed=4)
    assert {a.input_len for a in poisson(9, 1.0, 300, 40, spread=0.0, seed=0)} == {300}


CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AT = "2023-11-16 18:15:46.68"
TOKENS = "allowed: an integer from 1 to 1,000,000,000"
MS = "allowed: milliseconds, 0 to 100,000,000,000,000"
OBJECT = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [0]}
DATE = "allowed: a date and time such as 2023-11-16 18:15:46.6805900"


def test_times_may_say_that_they_are_in_utc(tmp_path):
    """As those of Azure's traces of 2024 do; spreadsheets put a mark before the first column."""
    file = tmp_path / "trace"
    rows = ("2024-05-10 00:00:00.009930+00:00,2162,5", "2024-05-10 02:00:02+02:00,7,1")
    file.write_text("\ufeff" + CSV + "\n".join(rows))
    first, second = read_trace(file)
    assert second.time - first.time == pytest.approx(1.99007, abs=1e-6)
    assert (first.input_len, second.output_len) == (2162, 1)


def assert_refused(file, before, line, said):
    """A trace whose last line is bad, behind lines that are not."""
    file.write_text(f"{before}{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(file)
    number = before.count("\n") + 1
    assert str(caught.value) == f"line {number} of the trace {file}: {said}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a trace"),
        ("a,b,c\n1,2,3\n", "is not a trace"),
        (CSV, "has no requests"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, said):
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_trace(file)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (f"{AT},3,x", f"GeneratedTokens is 'x', {TOKENS}"),
        (f"{AT},0,1", f"ContextTokens is 0, {TOKENS}"),
        (f"{AT},3,1000000001", f"GeneratedTokens is 1000000001, {TOKENS}"),
        (f"{AT},3", "lacks GeneratedTokens"),
        (f"{AT},3,1,4", "has 4 columns, allowed: 3, TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("yesterday,3,1", f"TIMESTAMP is 'yesterday', {DATE}"),
        ("2023-11-16 18:15:46.1e400,3,1", f"TIMESTAMP is '2023-11-16 18:15:46.1e400', {DATE}"),
        (
            "2223-11-16 18:15:46.68,3,1",
            "timestamp is 6311347200 s from another line's, allowed: up to 315,360,000, 10 years",
        ),
    ],
)
def test_a_bad_row_is_told_by_line_and_column(tmp_path, row, said):
    assert_refused(tmp_path / "trace.csv", f"{CSV}\n{AT},3,1\n", row, said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hash_ids": None}, "hash_ids is None, allowed: a list of integers from 0"),
        ({"hash_ids": [True]}, "hash_ids is [True], allowed: a list of integers from 0"),
        (
            {"input_length": 513},
            "hash_ids has 1 ids, allowed for input_length 513: 2 or more, one for each 512 tokens",
        ),
        ({"input_length": math.inf}, f"input_length is inf, {TOKENS}"),
        ({"output_length": True}, f"output_length is True, {TOKENS}"),
        ({"output_length": 1.5}, f"output_length is 1.5, {TOKENS}"),
        ({"timestamp": 10**400}, f"timestamp is 1{'0' * 76}..., {MS}"),
        ({"timestamp": math.nan}, f"timestamp is nan, {MS}"),
        ({"timestamp": math.inf}, f"timestamp is inf, {MS}"),
        ({"timestamp": 9e17}, f"timestamp is 9e+17, {MS}"),
        ({"timestamp": "0"}, f"timestamp is '0', {MS}"),
        (
            {"timestamp": 1e12},
            "timestamp is 1000000000 s from another line's, allowed: up to 315,360,000, 10 years",
        ),
    ],
)
def test_a_bad_object_is_told_by_line_and_field(tmp_path, given, said):
    line = json.dumps({**OBJECT, **given})
    assert_refused(tmp_path / "trace.jsonl", f"{json.dumps(OBJECT)}\n\n", line, said)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"timestamp": 0, "input_length": 3, "output_length": 1}', "lacks hash_ids"),
        ("[0]", "is [0], allowed: a JSON object"),
        ("{'timestamp': 0}", "is {'timestamp': 0}, allowed: a JSON object"),
        ("[" * 100_000, f"is {'[' * 77}..., allowed: a JSON object"),
    ],
)
def test_what_is_no_such_object_is_told_by_line(tmp_path, line, said):
    assert_refused(tmp_path / "trace.jsonl", f"{json.dumps(OBJECT)}\n", line, said)


def test_requests_at_one_instant_have_no_rate(tmp_path):
    file = tmp_path / "trace.csv"
    for count in (1, 2):
        file.write_text(CSV + f"{AT},3,1\n" * count)
        arrivals = read_trace(file)
        assert [a.time for a in arrivals] == [0.0] * count
        assert rate_of(arrivals) is None


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "nowhere.csv")
