"""What each key has used, by day and model, in SQLite."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import astuple, dataclass, fields
from typing import Any

from llmjax.errors import ConfigError

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 3.0
"""What a crash may lose."""

Row = tuple[str, str, str]
"""(day as UTC has it, name of the key, model)"""


@dataclass
class Used:
    """Attributes:
    cached_tokens: of the prompt tokens, those that the prefix cache had.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def add(self, other: Used) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


COUNTS = tuple(field.name for field in fields(Used))
CREATE = f"""
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    {", ".join(f"{name} INTEGER NOT NULL" for name in COUNTS)},
    PRIMARY KEY (day, key, model)
) WITHOUT ROWID
"""
ADD = f"""
INSERT INTO usage VALUES (?, ?, ?{", ?" * len(COUNTS)})
ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTS)}
"""


class Tally:
    """What was used and has not been written anywhere."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._new: dict[Row, Used] = {}

    def add(self, key: str, model: str, used: Used) -> None:
        day = time.strftime("%Y-%m-%d", time.gmtime(self._clock()))
        self.put([((day, key, model), used)])

    def put(self, rows: Iterable[tuple[Row, Used]]) -> None:
        for row, used in rows:
            self._new.setdefault(row, Used()).add(used)

    def take(self) -> dict[Row, Used]:
        """All of it; from here on it is the caller's."""
        new, self._new = self._new, {}
        return new


class Ledger(Tally):
    """Counts in memory, and adds that to a database in a thread of its own.

    Several servers may share the file. A transaction is written whole or not at all, whatever
    happens to the process or the machine.

    Args:
        path: of the database; None keeps it in memory.

    Raises:
        ConfigError: it cannot be opened, or is something else.
    """

    def __init__(self, path: str | None = None, clock: Callable[[], float] = time.time):
        super().__init__(clock)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="usage")
        try:
            self._db = self._thread.submit(connect, path or ":memory:").result()
        except sqlite3.Error as error:
            self._thread.shutdown()
            raise ConfigError(f"usage_db {path} cannot be used: {error}") from error

    async def flush(self) -> None:
        """Writes what is new. Where that fails it is kept for the next time."""
        if not (new := self.take()):
            return
        try:
            await self._in_thread(self._write, new)
        except sqlite3.Error as error:
            logger.error("usage is not written, and will be tried again: %s", error)
            self.put(new.items())

    async def read(self, key: str | None, since: str, until: str) -> list[dict[str, Any]]:
        """Rows from one day to another, both included, newest first; of one key, or of all."""
        await self.flush()
        return await self._in_thread(self._select, key, since, until)

    async def close(self) -> None:
        await self.flush()
        await self._in_thread(self._db.close)
        self._thread.shutdown()

    @asynccontextmanager
    async def flushed(self) -> AsyncIterator[None]:
        """Writes every few seconds meanwhile, and at the end."""
        task = asyncio.ensure_future(self._keep_flushing())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await self.close()

    async def _keep_flushing(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            # What has been taken to be written is written, or kept, even at the end.
            await asyncio.shield(asyncio.ensure_future(self.flush()))

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _write(self, new: dict[Row, Used]) -> None:
        with self._db:
            self._db.executemany(ADD, [(*row, *astuple(used)) for row, used in new.items()])

    def _select(self, key: str | None, since: str, until: str) -> list[dict[str, Any]]:
        where = "day BETWEEN ? AND ?" + ("" if key is None else " AND key = ?")
        values = [since, until] if key is None else [since, until, key]
        columns = ("day", "key", "model", *COUNTS)
        rows = self._db.execute(
            f"SELECT {', '.join(columns)} FROM usage WHERE {where} ORDER BY day DESC, key, model",
            values,
        )
        return [dict(zip(columns, row, strict=True)) for row in rows]


def connect(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        with db:
            db.execute(CREATE)
            columns = [column[1] for column in db.execute("PRAGMA table_info(usage)")]
    except BaseException:
        db.close()
        raise
    if columns != ["day", "key", "model", *COUNTS]:
        db.close()
        raise sqlite3.DatabaseError(f"its table usage has the columns {', '.join(columns)}")
    return db
