"""Whether and when an engine that ended is started again, and what its end is called. Pure.

- It had been ready: again, always; after 1 s, and after twice as long each time it happened within ten minutes.
- It never became ready: a few times in all, then not any more; an argument it does not know, not even twice. Docker's
  own on-failure:N would not do: it counts failures of a whole life, and does not come back with the Docker daemon.
"""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

WINDOW_S = 600
LONGEST_DELAY_S = 60.0
WRONG_USAGE = 2  # argparse's exit code

# The end of a traceback, bare or behind a logger's prefix; and argparse's last word.
_CAUSE = re.compile(r"(?:^|\s)(?:\w+\.)*(\w*(?:Error|Exception): .+)$|^vllm[\w ]*: (error: .+)$")
# A settings check that failed names itself in one line and what was wrong in the next.
_HEADING = re.compile(r"ValidationError: \d+ validation errors? for \w+$")
_DETAIL = re.compile(r"Value error, (.+?)(?: \[type=.*)?$")
# What the parent of the process that failed says about it; true, and no help.
_ECHO = re.compile(r"Engine core initialization failed|EngineDeadError|EngineCore encountered an issue")


@dataclass(frozen=True)
class Ended:
    """How one run of the engine ended. `killed`: our own reason for it. `oom`: the memory limit took a process."""

    code: int
    was_ready: bool
    killed: str
    tail: Sequence[str]
    oom: bool = False


@dataclass(frozen=True)
class Again:
    why: str
    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    why: str


@dataclass
class Restarts:
    """Told of every end in time order; times are seconds of one monotonic clock."""

    max_starts: int
    failed_starts: int = 0
    ends_s: deque[float] = field(default_factory=deque)

    def after(self, ended: Ended, now_s: float) -> Again | GiveUp:
        why = cause(ended)
        if ended.was_ready:
            self.failed_starts = 0
            self.ends_s.append(now_s)
            while now_s - self.ends_s[0] > WINDOW_S:
                self.ends_s.popleft()
            return Again(f"the engine ended: {why}", min(2.0 ** (len(self.ends_s) - 1), LONGEST_DELAY_S))
        self.failed_starts += 1
        if ended.code == WRONG_USAGE and not ended.killed:
            return GiveUp(f"the engine refuses its arguments: {why}")
        told = f"the engine did not start ({self.failed_starts} of {self.max_starts} times): {why}"
        if self.failed_starts >= self.max_starts:
            return GiveUp(told)
        return Again(told, 5.0 * self.failed_starts)


def _errors(tail: Sequence[str]) -> list[str]:
    """What the lines name as errors, in their order."""
    found = []
    for line in tail:
        if detail := _DETAIL.search(line):
            found.append(detail[1])
        elif (error := _CAUSE.search(line)) and not _HEADING.search(line):
            found.append(error[1] or error[2])
    return found


def cause(ended: Ended) -> str:
    """One line: our own reason, the memory limit, the engine's first error, the signal, or its exit code."""
    if ended.killed:
        return ended.killed
    if ended.oom:
        return "out of memory at the container's limit (ENGINE_MEMORY in .env)"
    errors = _errors(ended.tail)
    told = [error for error in errors if not _ECHO.search(error)] or errors
    if told:
        return told[0]
    if ended.code < 0:
        return f"ended by {signal.Signals(-ended.code).name}"
    return f"exit code {ended.code}"
