"""One engine process and all it started: its output copied and remembered, its end complete."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

TAIL_LINES = 400  # a failed start's cause stands some hundred lines above its end


class Engine:
    """Started by the constructor. vLLM is a tree of processes: it runs in a session of its own, killed as a whole."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self._oom_kills = oom_kills()
        self._process = subprocess.Popen(
            command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._reader = threading.Thread(target=self._copy, daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """To the first process alone: it knows how to end the others."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """Whatever of it still runs, stopped processes too; returns when the first process is gone."""
        for pid in _session(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=2)

    def oom_killed(self) -> bool:
        """Whether the container's memory limit took one of its processes since it was started."""
        return oom_kills() > self._oom_kills

    def tail(self) -> tuple[str, ...]:
        """Its last lines."""
        return tuple(self._tail)

    def _copy(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            self._tail.append(raw.decode("utf-8", "replace").rstrip("\n"))
            sys.stdout.buffer.write(raw)
            sys.stdout.buffer.flush()


def oom_kills() -> int:
    """How often the kernel killed a process at this container's memory limit; 0 where it does not say."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            fields = dict(line.split() for line in Path(path).read_text(encoding="ascii").splitlines())
            return int(fields.get("oom_kill", 0))
    return 0


def _session(leader: int) -> list[int]:
    """All processes of a session. The group would not do: a child may have made its own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # pid (name) state ppid pgrp session …; the name may hold anything, a parenthesis too
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == leader:
                found.append(int(path.parent.name))
    return found
