"""The quantize service, a job before the engine (COMPOSE_PROFILES=...,quantize): as whom it runs, and what it said."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts._compose import JOBS, Compose, Container
from scripts._demo_talk import Terminal
from scripts._running import ENGINES

USER = 10004  # of docker/quantize.Dockerfile


class JobError(Exception):
    """The job ended without its checkpoint; the first line says why."""


@dataclass(frozen=True)
class Writer:
    """As whom the job runs: `user` for compose. `give` : whether the directory has to be given to that user first."""

    user: str
    give: bool = False


def writer(models: Path, euid: int) -> Writer:
    """The owner of MODELS_DIR, who can write there; where that is root, a user of the job's own. Raises JobError."""
    try:
        owner = models.stat()
    except OSError as error:
        raise JobError(f"{models}: {error.strerror}: the job needs the model there first (make model)") from error
    if owner.st_uid:
        return Writer(f"{owner.st_uid}:{owner.st_gid}")
    if euid:
        raise JobError(f"{models} belongs to root, and the job does not run as root: sudo chown {euid} {models}")
    return Writer(f"{USER}:{USER}", give=True)


def give(models: Path, chosen: Writer) -> None:
    """Root keeps its own way in. Raises OSError."""
    if chosen.give:
        os.chown(models, USER, USER)


def wanted(profiles: Sequence[str]) -> bool:
    return any(name in JOBS for name in profiles)


def run(compose: Compose, services: Sequence[str], terminal: Terminal) -> None:
    """Starts all but the engines, so that the gateway answers meanwhile; returns when the job has ended well.

    Raises JobError with its last lines, ComposeError.
    """
    job = next(name for name in services if name in JOBS)
    first = [name for name in services if name not in ENGINES]
    compose.run("up", "--detach", "--no-build", "--no-deps", *first)
    pause = threading.Event()
    while (ended := _ended(compose.containers(), job)) is None:
        last = compose.tail(job, 1)
        terminal.waiting(f"waiting for {job}: {last[-1] if last else 'it starts'}")
        pause.wait(1)
    tail = compose.tail(job, 15)
    if ended:
        said = tail[-1] if tail else "it said nothing"
        raise JobError(f"{job} ended with exit code {ended}, the engine was not started: {said}")
    terminal.line(f"{job}    {tail[-1] if tail else 'done'}")


def _ended(containers: Sequence[Container], job: str) -> int | None:
    """The job's exit code; None while it runs."""
    found = next((each for each in containers if each.service == job), None)
    return found.code if found is not None and found.state in ("exited", "dead") else None
