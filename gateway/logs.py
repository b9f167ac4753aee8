"""Logs: one JSON object a line on stderr. No prompt, answer, key or header value is ever a field.

Lines are written by a thread. Whoever is to read stderr may stand still, and a write into a full pipe then blocks: that
must cost lines, which are counted, and not the event loop.
"""

import contextlib
import datetime
import fcntl
import logging
import os
import queue
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import orjson

MAX_LINES = 10_000  # that wait to be written; what comes on top is dropped
GATHER_S = 0.01  # lines of this long go out in one write: waking the thread for each would cost more than the line
CLOSE_S = 2.0  # for the last lines, at the end of the process


class JsonFormatter(logging.Formatter):
    """`logger.info("event", extra={"fields": {...}})` becomes {"at", "level", "logger", "event", **fields}."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.datetime.fromtimestamp(record.created, datetime.UTC),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
            **_mark,
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line.update(fields)
        if record.exc_info:
            line["exception"] = _exception(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_UTC_Z).decode()


def _exception(
    info: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
) -> dict[str, Any]:
    """Type and frames, of its causes as well. Not the message: parsers and validators quote what they were given."""
    chain: list[dict[str, Any]] = []
    error = info[1]
    while error is not None and len(chain) < 5:
        frames = [
            f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)
        ]
        chain.append({"type": f"{type(error).__module__}.{type(error).__qualname__}", "frames": frames[-20:]})
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return {"chain": chain}


class LineWriter:
    """A thread that writes lines to a file descriptor, and never keeps waiting who hands them over.

    `on_drop` is called for each line that was not written: too many were waiting, or the descriptor takes none. It may
    be called in any thread.
    """

    def __init__(self, descriptor: int, max_lines: int = MAX_LINES, turn: int | None = None) -> None:
        """`turn`: a file whose lock says whose turn it is, where several processes write to one descriptor."""
        self.on_drop: Callable[[], None] = lambda: None
        self._descriptor = descriptor
        self._turn = turn
        self._max_lines = max_lines
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._dropped = self._told = 0
        # A daemon: a write that blocks for ever must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<LineWriter {self._lines.qsize()} lines waiting, {self._dropped} dropped>"

    def put(self, line: bytes) -> None:
        """Have a line written, soon. It ends in a newline."""
        if self._lines.qsize() < self._max_lines:
            self._lines.put(line)
        else:
            self.drop()

    def drop(self, lines: int = 1) -> None:
        """Count lines that are lost."""
        self._dropped += lines
        for _ in range(lines):
            self.on_drop()

    def close(self) -> None:
        """Write what is left, for CLOSE_S at most."""
        self._lines.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        closing = False
        while not closing:
            line = self._lines.get()
            time.sleep(GATHER_S)
            lines = []
            while line is not None:
                lines.append(line)
                try:
                    line = self._lines.get_nowait()
                except queue.Empty:
                    break
            closing = line is None
            try:
                with self._locked():
                    self._write(b"".join(lines))
            except OSError:
                self.drop(len(lines))
            else:
                self._tell_dropped()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """A pipe takes 4 KiB in one piece at most: without turns, lines of two workers would run into each other."""
        if self._turn is None:
            yield
            return
        fcntl.lockf(self._turn, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._turn, fcntl.LOCK_UN)

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # whoever shares the terminal or pipe made it so
                select.select([], [self._descriptor], [])

    def _tell_dropped(self) -> None:
        dropped = self._dropped
        if dropped > self._told:
            fields = {"lines": dropped - self._told}
            self._told = dropped
            self.put(_line({"level": "WARNING", "logger": __name__, "event": "log lines were dropped", **fields}))


class _Handler(logging.Handler):
    """Formats where the record was made, and leaves the writing to the thread."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.put(self.format(record).encode() + b"\n")
        except Exception:
            self._writer.drop()


def _line(fields: dict[str, Any]) -> bytes:
    return orjson.dumps({"at": datetime.datetime.now(datetime.UTC), **fields, **_mark}, option=_LINE)


_LINE = orjson.OPT_UTC_Z | orjson.OPT_APPEND_NEWLINE
_writer: LineWriter | None = None  # of the process, as `logging` itself is
_mark: dict[str, int] = {}  # in every line of this process: which worker it is


def write_access(fields: dict[str, Any]) -> None:
    """The one line a finished request leaves. Past `logging`, whose records cost a tenth of its whole work."""
    line = _line({"level": "INFO", "logger": "gateway.access", "event": "request", **fields})
    if _writer is not None:
        _writer.put(line)
    else:
        sys.stderr.write(line.decode())


def configure(level: str, turn: int | None = None, worker: int | None = None) -> LineWriter:
    """Send everything to stderr as JSON; uvicorn's own access log stays off, the edge writes a better one.

    Whoever calls it closes the writer at the process's end. `turn` as LineWriter has it; `worker` is in every line.
    """
    global _writer
    _writer = LineWriter(2, turn=turn)
    _mark.clear()
    if worker is not None:
        _mark["worker"] = worker
    handler = _Handler(_writer)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
    # Libraries speak of requests at their lower levels, headers included.
    for name in ("uvicorn", "httpx", "httpcore", "asyncio", "aiohttp", "opentelemetry", "urllib3", "requests"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return _writer
