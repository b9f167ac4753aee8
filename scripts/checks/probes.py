"""How the checks look at the world. Everything that differs from machine to machine passes through here."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx

from scripts import _ports, engine_check

ROOT = Path(__file__).parents[2]
RUN_S = 20  # `docker info` beside a busy engine takes seconds; one that takes longer is stuck
GET_S = 5


@dataclass(frozen=True)
class Ran:
    """A command that ended. code 124: it did not end in time and was killed."""

    code: int
    out: str
    err: str = ""

    @property
    def why(self) -> str:
        """The first line it gave as a reason."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[0] if lines else f"it ended with code {self.code} and said nothing"


@dataclass(frozen=True)
class Answer:
    status: int
    text: str


class Run(Protocol):
    """Runs a read-only command, in the environment given (else this one); None where there is no such program."""

    def __call__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> Ran | None: ...


def run(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Ran | None:
    """`Run` on this machine, from the project's root."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=RUN_S,
            cwd=ROOT,
            env=None if environ is None else dict(environ),
        )
    except (FileNotFoundError, PermissionError):
        return None
    except subprocess.TimeoutExpired:
        return Ran(124, "", f"{command[0]} gave no answer in {RUN_S} s")
    return Ran(done.returncode, done.stdout, done.stderr)


def read(path: Path) -> str | None:
    """A text file; None where it is not there or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def get(url: str) -> Answer | None:
    """An HTTP answer whatever its status; None where nobody answers."""
    try:
        answer = httpx.get(url, timeout=GET_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    return Answer(answer.status_code, answer.text)


def disk_free(path: Path) -> int | None:
    """Bytes free where `path` lies, or where it would be made."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    with contextlib.suppress(OSError):
        return shutil.disk_usage(there).free
    return None


def port_holder(port: int) -> str | None:
    """Who listens on a port of this host, None where it is free."""
    return None if _ports.is_free(port) else _ports.holder(port)


@dataclass(frozen=True)
class Probes:
    """The eyes and ears of the checks. A test hands in recorded answers for what its machine does not have."""

    run: Run = run
    read: Callable[[Path], str | None] = read
    get: Callable[[str], Answer | None] = get
    disk_free: Callable[[Path], int | None] = disk_free
    port_holder: Callable[[int], str | None] = port_holder
    machine: Callable[[], engine_check.Machine] = field(default=lambda: engine_check.look(ROOT))
    file_limits: Callable[[], tuple[int, int]] = field(default=lambda: resource.getrlimit(resource.RLIMIT_NOFILE))
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = ROOT
