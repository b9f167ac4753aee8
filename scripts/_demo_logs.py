"""What the demo's processes say: kept in a file each, and read for what a person wants to know."""

from __future__ import annotations

import re
import signal
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from honcho.printer import Message, Printer  # type: ignore[import-untyped]

SYSTEM = "system"  # the name under which honcho itself speaks
_STOPPED = re.compile(r"^(\S+) stopped \(rc=(-?\d+)\)$")
_SIGNAL = re.compile(r"^(SIG\w+) received$")
# The end of a traceback, bare or behind a logger's prefix; a warning that quotes an error is none.
_CAUSE = re.compile(r"^(?:.* ERROR .*\] )?\s*(?:\w+\.)*(\w*(?:Error|Exception): .+)$")
_NOISE = re.compile(r"^INFO:|^\(.*\) INFO |resource_tracker|^\s+warnings\.warn\(|^\s*$")
# vLLM's log lines that tell how far a start has come, in their order.
_PHASES = (
    ("version 0.", "reading the model's configuration"),
    ("Using max model len", "starting the engine's process"),
    ("Initializing a V1 LLM engine", "starting the worker's process"),
    ("Starting to load model", "loading the weights"),
    ("Warming up model", "warming up"),
    ("KV cache size", "setting up the API"),
    ("Application startup complete", "up"),
)
_KV_SIZE = re.compile(r"KV cache size: ([\d,]+) tokens")


class Logs(Printer):  # type: ignore[misc]  # honcho carries no types
    """honcho's printer: lines go to FOLDER/NAME.log. `on_start` runs once, when all processes have been started.

    Written by the main thread (honcho's loop); others read its fields and wait for `ended`.
    """

    def __init__(self, folder: Path, on_start: Callable[[], None]) -> None:
        super().__init__()
        self.folder = folder
        self.ended = threading.Event()  # a process stopped, a signal came, or a log can't be written
        self.stopped: tuple[str, int] | None = None  # the first process that stopped, and its exit code
        self.signal: str | None = None
        self.unwritable: str | None = None  # why a log can't be written
        self.phase = "importing vLLM"
        self.kv_tokens: str | None = None
        self._tails: dict[str, deque[str]] = {}
        self._on_start: Callable[[], None] | None = on_start

    def path(self, name: str) -> Path:
        """The log of one process."""
        return self.folder / f"{name}.log"

    def write(self, message: Message) -> None:
        """Called by honcho for each line. Must not print: a signal handler calls it too."""
        if self._on_start is not None:  # honcho has forked all of them before it writes its first line
            start, self._on_start = self._on_start, None
            start()
        data = message.data.decode("utf-8", "replace") if isinstance(message.data, bytes) else message.data
        line = data.rstrip("\n")
        if message.name == SYSTEM:
            self._system(line)
            return
        self._tails.setdefault(message.name, deque(maxlen=400)).append(line)
        if message.name == "engine":
            self._engine(line)
        try:
            with self.path(message.name).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            self.unwritable = self.unwritable or f"{self.path(message.name)}: {error.strerror}"
            self.ended.set()

    def _system(self, line: str) -> None:
        if found := _STOPPED.match(line):
            self.stopped = self.stopped or (found[1], int(found[2]))
            self.ended.set()
        elif found := _SIGNAL.match(line):
            self.signal = self.signal or found[1]  # a later SIGTERM is our own
            self.ended.set()

    def _engine(self, line: str) -> None:
        for text, phase in _PHASES:
            if text in line:
                self.phase = phase
        if found := _KV_SIZE.search(line):
            self.kv_tokens = found[1]

    def tail(self, name: str, lines: int = 4) -> list[str]:
        """The last lines a process said, without those that never explain an end."""
        return [line for line in self._tails.get(name, ()) if not _NOISE.search(line)][-lines:]

    def why(self, name: str, code: int) -> str:
        """One phrase for a process that stopped: its first error, or the signal, or its last word."""
        lines = list(self._tails.get(name, ()))
        if any("No space left on device" in line for line in lines):
            return "no space left on the disk"
        for line in lines:
            if found := _CAUSE.search(line):
                return found[1]
        if code > 128:
            name_of = {signal.SIGKILL: "killed (SIGKILL); was the memory full?"}
            return name_of.get(signal.Signals(code - 128), f"ended by {signal.Signals(code - 128).name}")
        last = self.tail(name, 1)
        return last[0] if last else "it said nothing"
