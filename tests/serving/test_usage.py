"""What each key has used: kept in SQLite, and told."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys

import pytest

from llmjax.errors import ConfigError
from llmjax_serving import ledger
from llmjax_serving.config import ServerConfig
from llmjax_serving.ledger import Ledger, Used

from .double import MODEL, EngineDouble, client_of, run_async, until
from .test_keys import bearer, key_file

PROMPT = {"prompt": "abc"}
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens")


async def rows_of(client, secret="", query="") -> list[tuple]:
    response = await client.get("/usage" + query, headers=bearer(secret))
    assert response.status == 200
    rows = (await response.json())["data"]
    assert all(len(row.pop("day")) == 10 and row.pop("model") == MODEL for row in rows)
    return [(row["key"], *(row[name] for name in COUNTS)) for row in rows]


@run_async
async def test_without_keys_all_is_of_one_anonymous():
    async with client_of(EngineDouble()) as client:
        assert await rows_of(client) == []
        await client.post("/v1/completions", json={**PROMPT, "n": 2})
        assert await rows_of(client) == [("anonymous", 1, 3, 2, 10)]
        await client.post("/v1/completions", json={"prompt": ["a", "b"], "stream": True})
        bad = await client.post("/v1/completions", json={"prompt": ""})
        assert bad.status == 400
        assert await rows_of(client) == [("anonymous", 2, 5, 6, 20)]


@run_async
async def test_an_admin_sees_all_and_others_their_own(tmp_path):
    path = key_file(
        tmp_path,
        {"name": "root", "key": "r", "admin": True},
        {"name": "alice", "key": "a"},
        {"name": "bob", "key": "b"},
    )
    async with client_of(EngineDouble(), ServerConfig(api_key_file=path)) as client:
        for secret in "aab":
            await client.post("/v1/completions", json=PROMPT, headers=bearer(secret))
        alice, bob = ("alice", 2, 6, 4, 10), ("bob", 1, 3, 2, 5)
        assert await rows_of(client, "r") == [alice, bob]
        assert await rows_of(client, "r", "?key=bob") == [bob]
        assert await rows_of(client, "a") == [alice]
        assert await rows_of(client, "b", "?key=bob") == [bob]
        assert (await client.get("/usage?key=bob", headers=bearer("a"))).status == 403
        assert await rows_of(client, "r", "?until=2000-01-01") == []
        for query in ("since=yesterday", "since=2000-1-1", "until=2026-02-30", "what=1"):
            response = await client.get(f"/usage?{query}", headers=bearer("r"))
            assert response.status == 400
            assert (await response.json())["error"]["param"] == query.split("=")[0]


@run_async
async def test_a_stream_that_is_cut_off_is_charged_for_what_it_used():
    engine = EngineDouble(says=["Hel", "lo"], gate=asyncio.Event())
    async with client_of(engine) as client:
        response = await client.post("/v1/completions", json={**PROMPT, "stream": True})
        await response.content.readline()
        response.close()
        await until(lambda: not engine.running)
        assert await rows_of(client) == [("anonymous", 1, 3, 2, 3)]


@run_async
async def test_what_is_used_outlives_the_server(tmp_path):
    config = ServerConfig(usage_db=str(tmp_path / "usage.db"))
    for before in (0, 2):
        async with client_of(EngineDouble(), config) as client:
            assert await rows_of(client) == ([("anonymous", 2, 6, 4, 10)] if before else [])
            for _ in range(2):
                await client.post("/v1/completions", json=PROMPT)
    with sqlite3.connect(config.usage_db) as db:
        assert db.execute("SELECT requests, prompt_tokens FROM usage").fetchall() == [(4, 12)]


@run_async
async def test_it_is_written_every_few_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "FLUSH_SECONDS", 0.01)
    config = ServerConfig(usage_db=str(tmp_path / "usage.db"))
    async with client_of(EngineDouble(), config) as client:
        await client.post("/v1/completions", json=PROMPT)
        with sqlite3.connect(config.usage_db) as other:
            await until(lambda: other.execute("SELECT requests FROM usage").fetchall() == [(1,)])


def test_what_was_written_survives_a_crash(tmp_path):
    path = str(tmp_path / "usage.db")
    code = """
import asyncio, os, sys
from llmjax_serving.ledger import Ledger, Used
async def main():
    ledger = Ledger(sys.argv[1])
    for _ in range(3):
        ledger.add("k", "m", Used(1, 2, 3, 4))
        await ledger.flush()
    ledger.add("k", "m", Used(1, 2, 3, 4))
    os._exit(9)
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code, path]).returncode == 9
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("SELECT key, requests, generated_tokens FROM usage").fetchall() == [
            ("k", 3, 12)
        ]


@run_async
async def test_what_could_not_be_written_is_kept_and_counted_once(tmp_path, caplog):
    path = str(tmp_path / "usage.db")
    ours, day = Ledger(path, clock=lambda: 86400.0), "1970-01-02"
    ours.add("a", "m", Used(1, 10))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("ALTER TABLE usage RENAME TO gone")
    await ours.flush()
    assert "will be tried again" in caplog.text
    ours.add("a", "m", Used(1, 5))
    other.execute("ALTER TABLE gone RENAME TO usage")
    other.close()
    expected = {"requests": 2, "prompt_tokens": 15, "cached_tokens": 0, "generated_tokens": 0}
    assert await ours.read(None, day, day) == [{"day": day, "key": "a", "model": "m", **expected}]
    assert await ours.read("b", day, day) == [] == await ours.read(None, "1970-01-03", "2000-01-01")
    await ours.close()


def test_what_is_no_ledger_is_refused(tmp_path):
    text = tmp_path / "text"
    text.write_text("no database" * 1000)
    with pytest.raises(ConfigError, match="not a database"):
        Ledger(str(text))
    with pytest.raises(ConfigError, match="unable to open"):
        Ledger(str(tmp_path / "no" / "folder"))
    with sqlite3.connect(tmp_path / "other") as db:
        db.execute("CREATE TABLE usage (what TEXT)")
    with pytest.raises(ConfigError, match="its table usage has the columns what"):
        Ledger(str(tmp_path / "other"))
