"""Runs one command so that nothing of it is ever left: its children's children neither, however anybody dies.

    python -m scripts._guard --parent PID [--grace S] -- COMMAND...

vLLM is a tree of processes, and its branches outlive a killed trunk. The guard adopts what loses its parent (Linux
"child subreaper") and, when the command ends, a signal asks it to, or process PID is gone, ends the command politely
and then kills whatever of the tree still runs. Exit code: the command's (128 + signal where one ended it).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

from scripts._children import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
TIDY_S = 2.0


def guard(command: list[str], parent: int, grace_s: float) -> int:
    """Blocks until the command and all it started are gone; returns its exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    try:
        parent_gone = os.pidfd_open(parent)
    except ProcessLookupError:
        return 1
    child = subprocess.Popen(command, preexec_fn=die_with_parent())
    select.select([parent_gone, os.pidfd_open(child.pid), woken], [], [])
    child.terminate()
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
    code = child.wait()
    _kill_descendants()
    return code if code >= 0 else 128 - code


def _kill_descendants() -> None:
    """Kills until none is left; a process in an uninterruptible wait ends later, but it ends.

    First they may end by themselves: Python's resource tracker, if it lives that long, removes the shared memory that
    vLLM left in /dev/shm.
    """
    psutil.wait_procs(psutil.Process().children(recursive=True), timeout=TIDY_S)
    until = time.monotonic() + 5
    while left := psutil.Process().children(recursive=True):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(left, timeout=0.5)
        if alive and time.monotonic() > until:
            return


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts._guard", description="Run a command and leave nothing of it."
    )
    parser.add_argument("--parent", type=int, default=os.getppid(), help="end when this process is gone")
    parser.add_argument("--grace", type=float, default=4.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    try:
        return guard(command, args.parent, args.grace)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
