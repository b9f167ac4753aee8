"""What a change of the running stack was doing, kept on disk: a later command finds it after a kill -9, and heals it.

`.stack/swap.json` is there from before the first step of a change until after its last; `.stack/swap.lock` is held by
the process that makes it, and the kernel lets go of it however that process ends.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from scripts._compose import ROOT

FOLDER = ROOT / ".stack"  # the default of every function here

# Phases, in their order. `held`: the new engine was verified, what is left is to record it and let requests through.
DRAINING, CHANGING, HELD, UNDOING = "draining", "changing", "held", "undoing"


class JournalError(Exception):
    """Another change is under way, or the journal can't be read; the message is one line."""


@dataclass(frozen=True)
class Journal:
    """`what`: for people. `kind`: whose it is (upgrade, promote). `note`: what that one needs to undo or keep it."""

    what: str
    kind: str
    phase: str = DRAINING
    note: Mapping[str, str] = field(default_factory=dict)

    def at(self, phase: str) -> Journal:
        return replace(self, phase=phase)


def read(folder: Path | None = None) -> Journal | None:
    """The change that was not finished; None where all were. Raises JournalError."""
    path = (folder or FOLDER) / "swap.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Journal(**{name: found[name] for name in ("what", "kind", "phase", "note")})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JournalError(f"{path} can't be read ({error}): look at `make ps`, then remove the file") from error


def write(journal: Journal, folder: Path | None = None) -> None:
    """On the disk when it returns. Raises OSError."""
    folder = folder or FOLDER
    folder.mkdir(exist_ok=True)
    part = folder / "swap.json.part"
    with part.open("w", encoding="utf-8") as file:
        json.dump(asdict(journal), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / "swap.json")


def clear(folder: Path | None = None) -> None:
    with suppress(FileNotFoundError):
        ((folder or FOLDER) / "swap.json").unlink()


@contextmanager
def alone(folder: Path | None = None) -> Iterator[None]:
    """Only one process at a time changes the stack. Raises JournalError at once where another one does."""
    folder = folder or FOLDER
    folder.mkdir(exist_ok=True)
    with (folder / "swap.lock").open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise JournalError(f"{who} is changing the stack: wait for its end, or stop it") from None
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield
