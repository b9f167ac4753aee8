"""The usage ledger: what each tenant used, by day and model, in one SQLite file that outlives the gateway.

Requests only ever add to a table in memory; a task commits the sums a few times a second, in a thread. So a disk that
is slow, full or read-only costs no request anything, and kill -9 costs the ledger the last second at most. What could
not be committed is kept and tried again; the table is bounded, since days, tenants and model names are.
"""

import asyncio
import datetime
import logging
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

from gateway.exchange import Exchange
from gateway.metrics import Metrics
from gateway.protocol import HOT_ROUTES
from gateway.settings import SettingsError

logger = logging.getLogger(__name__)

COMMIT_INTERVAL_S = 0.25  # well under the second that may be lost, for commits take their time too
LAST_TRIES = 4  # at the end of the process
LAST_COMMIT_S = 10.0  # for all of them together, on a disk that hangs
BUSY_S = 2.0  # another process has the file: usage export, a second gateway
MAX_ROWS = 100_000  # never reached by days x tenants x models; if it were, the newest rows would be dropped, and told

SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL,
    tenant TEXT NOT NULL,
    model TEXT NOT NULL,
    requests INTEGER NOT NULL,
    refusals INTEGER NOT NULL,
    failures INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    generation_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, tenant, model)
) WITHOUT ROWID
"""
COUNTS = ("requests", "refusals", "failures", "prompt_tokens", "generation_tokens")
_ADD = (
    f"INSERT INTO usage (day, tenant, model, {', '.join(COUNTS)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "  # noqa: S608
    "ON CONFLICT (day, tenant, model) DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTS)
)

# What is wrong with one row, and not with the file: the others must not wait for it.
_BAD_ROW = (OverflowError, UnicodeError, sqlite3.InterfaceError, sqlite3.IntegrityError, sqlite3.DataError)

Row = tuple[str, str, str]
Table = dict[Row, list[int]]


def utc_day() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


class Ledger:
    """Owner of the table in memory and of the file. `async with` it; `record` may be called at any time."""

    def __init__(self, path: Path, metrics: Metrics, today: Callable[[], str] = utc_day) -> None:
        """Raises SettingsError where the file can't be opened: that is a mistake now, and would be a loss later."""
        self._path = path
        self._metrics = metrics
        self._today = today
        self._table: Table = {}
        self._stopping = asyncio.Event()
        self._failing = False
        try:
            self._connection: sqlite3.Connection | None = _open(path)
        except sqlite3.Error as error:
            raise SettingsError(
                f"ledger.path = {str(path)!r}: {error}; expected a SQLite file, new or our own, in a writable directory"
            ) from None
        self._opened = _identity(path)
        metrics.ledger_pending.set_function(lambda: len(self._table))

    def record(self, exchange: Exchange, model: str) -> None:
        """Count one finished request. `model` must be a served name or "": clients' own words would be unbounded."""
        if exchange.route not in HOT_ROUTES or exchange.tenant is None:
            return
        row = (self._today(), exchange.tenant.name, model)
        failed = bool(exchange.failure) or exchange.status >= 500
        counts = [
            1,
            exchange.refused,
            failed and not exchange.refused,
            exchange.prompt_tokens,
            exchange.generation_tokens,
        ]
        self._add(row, [int(count) for count in counts])

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="ledger")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Commit what is left; never cancelled in mid-commit, or it would not be known what was written."""
        self._stopping.set()
        done, _pending = await asyncio.wait({self._task}, timeout=LAST_COMMIT_S)
        if not done:
            logger.error("the ledger's last commit hangs", extra={"fields": {"rows": len(self._table)}})
            return
        self._task.result()
        self._close()

    def _add(self, row: Row, counts: Iterable[int]) -> None:
        sums = self._table.get(row)
        if sums is None:
            if len(self._table) >= MAX_ROWS:
                self._metrics.ledger_failures.inc()
                return
            sums = self._table[row] = [0] * len(COUNTS)
        for i, count in enumerate(counts):
            sums[i] += count

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(COMMIT_INTERVAL_S):
                    await self._stopping.wait()
            except TimeoutError:
                pass
            await self._commit()
        for _ in range(LAST_TRIES):
            await self._commit()
            if not self._table:
                return
            await asyncio.sleep(COMMIT_INTERVAL_S)
        logger.error(
            "usage is lost, the ledger could not be written to the end", extra={"fields": {"rows": len(self._table)}}
        )

    async def _commit(self) -> None:
        if not self._table:
            return
        batch, self._table = self._table, {}
        try:
            dropped = await asyncio.to_thread(self._write_what_can_be, batch)
        except Exception as error:  # whatever it was, the ledger goes on: one that died would lose all that follows
            for row, counts in batch.items():
                self._add(row, counts)
            self._metrics.ledger_failures.inc()
            self._note(f"{type(error).__name__}: {error}")
            return
        self._note("")
        if dropped:
            self._metrics.ledger_failures.inc(dropped)
            logger.error("usage is lost, the ledger can't take these rows", extra={"fields": {"rows": dropped}})

    def _note(self, failure: str) -> None:
        """Log a change for the worse or the better, not every try."""
        if failure and not self._failing:
            logger.error("the ledger can't be written, usage is kept in memory", extra={"fields": {"why": failure}})
        elif self._failing and not failure:
            logger.warning("the ledger can be written again")
        self._failing = bool(failure)

    def _write_what_can_be(self, batch: Table) -> int:
        """Like `_write`, without the rows that can never be written; how many those are."""
        try:
            self._write(batch)
        except _BAD_ROW:
            dropped = 0
            for row, counts in batch.items():
                try:
                    self._write({row: counts})
                except _BAD_ROW:
                    dropped += 1
                else:
                    counts[:] = [0] * len(COUNTS)  # if the file fails at a later row, this one is not added again
            return dropped
        return 0

    def _write(self, batch: Table) -> None:
        """In a thread, one at a time. All of the batch is on disk when it returns, none of it when it raises."""
        try:
            if self._connection is not None and _identity(self._path) != self._opened:
                self._close()  # moved away or replaced: what is written into the old file nobody would find
            if self._connection is None:
                self._connection = _open(self._path)
                self._opened = _identity(self._path)
            with self._connection:
                self._connection.executemany(_ADD, [(*row, *counts) for row, counts in batch.items()])
        except Exception:
            self._close()
            raise

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")  # readers never block the writer
        connection.execute("PRAGMA synchronous=FULL")  # a commit survives a power cut as well
        with connection:
            connection.execute(SCHEMA)
        connection.execute(f"SELECT day, tenant, model, {', '.join(COUNTS)} FROM usage LIMIT 0")  # noqa: S608
    except sqlite3.Error:
        connection.close()
        raise
    return connection
