"""What a job really takes, and the bound it ends at instead of taking the machine down."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from scripts.planner.numbers import gib

EVERY_S = 0.2


class OverBoundError(Exception):
    """The job was about to pass memory.ram_gib."""


def held() -> int:
    """Bytes of this process that nobody can take back: pages of mapped files are left out."""
    pages = dict.fromkeys(("RssAnon", "RssShmem"), 0)
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in pages:
            pages[name] = int(value.split()[0]) * 1024
    return sum(pages.values())


def peak() -> int:
    """The most this process ever had in memory, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def bounded(limit: int | None, look: Callable[[], int] = held) -> Iterator[None]:
    """Raises OverBoundError in the main thread soon after `look` passes `limit`. Without a limit nothing is watched."""
    if limit is None:
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        raise OverBoundError(gib(limit))

    def watch() -> None:
        while not ended.wait(EVERY_S):
            if look() > limit:
                signal.pthread_kill(main, signal.SIGUSR1)
                return

    main, ended = threading.main_thread().ident or 0, threading.Event()
    before = signal.signal(signal.SIGUSR1, stop)
    watcher = threading.Thread(target=watch, name="memory bound", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        signal.signal(signal.SIGUSR1, before)
