"""The engine's processes on this host: which they are, what memory they hold, and where their log is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from scripts.checks.nvidia import Smi, SmiError, read_smi
from scripts.checks.probes import Probes
from scripts.checks.proof import ProofError
from scripts.checks.proof.log import StartLog, parse_log

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Meter:
    """Reads the engine's memory in bytes; `what` says whose, and by what."""

    what: str
    read: Callable[[], int]


def listener(url: str) -> int | None:
    """The process that listens at a loopback URL, where this user may see it."""
    parts = urlsplit(url)
    if parts.hostname not in _LOOPBACK:
        return None
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            at = connection.laddr.port if connection.laddr else None
            if connection.status == psutil.CONN_LISTEN and at == (parts.port or 80) and connection.pid:
                return int(connection.pid)
    return None


def tree(pid: int) -> list[psutil.Process]:
    """The process and all its descendants. Raises ProofError where it is not there."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        raise ProofError(f"--pid {pid}: there is no such process here") from None


def meter(pid: int | None, on_gpu: bool, probes: Probes) -> Meter | None:
    """By nvidia-smi where the engine computes on a card: its own processes if they are named, else the whole card."""
    if on_gpu:
        with contextlib.suppress(SmiError):
            smi = read_smi(probes)
            if smi is not None and smi.cards:
                return _gpu_meter(pid, smi, probes)
        return None
    if pid is None:
        return None
    tree(pid)
    return Meter(f"proportional set size of process {pid} and its children", lambda: _resident(pid))


def _gpu_meter(pid: int | None, smi: Smi, probes: Probes) -> Meter:
    mine = {process.pid for process in tree(pid)} if pid is not None else set()
    named = [holder for card in smi.cards for holder in card.holders if holder.pid in mine and holder.used is not None]

    def by_process() -> int:
        now = read_smi(probes)
        return sum(h.used or 0 for card in (now.cards if now else ()) for h in card.holders if h.pid in mine)

    def whole() -> int:
        now = read_smi(probes)
        return sum(card.used for card in (now.cards if now else ()))

    if named:
        return Meter(f"nvidia-smi, processes {', '.join(str(holder.pid) for holder in named)}", by_process)
    return Meter("nvidia-smi, all programs on the card (the engine's are not named here)", whole)


def _resident(pid: int) -> int:
    """Shared pages are counted once: half the engine's memory is shared between its processes."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


def find_log(pid: int | None, root: Path) -> Path | None:
    """The demo's log of this very process, told by the pid in it."""
    if pid is None:
        return None
    ours = {process.pid for process in tree(pid)}
    for path in sorted((root / ".demo").glob("*/engine.log")):
        with contextlib.suppress(OSError, ProofError):
            if parse_log(path.read_text(encoding="utf-8", errors="replace")).pid in ours:
                return path
    return None


def card_sm(probes: Probes) -> int | None:
    """The compute capability of the one kind of card here, times ten."""
    with contextlib.suppress(SmiError):
        smi = read_smi(probes)
        kinds = {card.sm for card in smi.cards} if smi else set()
        return kinds.pop() if len(kinds) == 1 else None
    return None


def on_gpu(log: StartLog | None, probes: Probes) -> bool:
    """Whether the engine computes on a card: its log says so, or, without one, there is a card here."""
    if log is not None and log.device is not None:
        return log.device != "cpu"
    return probes.run(["nvidia-smi", "-L"]) is not None
