"""Child processes that never outlive us, and the signals that end us, as exceptions."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


class Terminated(BaseException):
    """SIGTERM or SIGHUP, raised where the main thread stands, so that every `finally` runs."""


def raise_on_termination() -> None:
    """From here on SIGTERM and SIGHUP raise Terminated; SIGINT keeps raising KeyboardInterrupt."""

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        raise Terminated(signal.Signals(signum).name)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """A preexec_fn: the kernel sends the child `signum` when we die, however we die (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def arrange() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
        if os.getppid() != parent:  # we died between fork and prctl
            os._exit(1)

    return arrange
