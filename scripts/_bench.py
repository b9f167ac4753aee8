"""What the benchmarks share: pinned child processes on free ports, readiness, percentiles."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

MODEL = "fake-8b"  # what the scripted engine serves


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def process(*command: str, core: int, env: dict[str, str] | None = None) -> Iterator[psutil.Process]:
    """A module of ours as a child pinned to one core, ended with the block, or with us however we end."""
    with launched((sys.executable, "-m", *command), core, env or {}, Path(os.devnull)) as child:
        yield child


@contextlib.contextmanager
def launched(command: Sequence[str], core: int, env: dict[str, str], log: Path) -> Iterator[psutil.Process]:
    """Any program likewise. What it prints goes to `log`."""
    # By programs, not in a fork of ours: this process may have threads, and a fork of one can stand still before it
    # becomes anything else. Pinned before it asks how many threads it may have.
    arranged = ("setpriv", "--pdeathsig", "KILL", "taskset", "--cpu-list", str(core % (os.cpu_count() or 1)))
    with log.open("ab") as output:
        child = subprocess.Popen(
            (*arranged, *command),
            env={**os.environ, **env},
            stderr=output,
            stdout=output,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield psutil.Process(child.pid)
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def cores() -> list[int]:
    """The cores this process may use, those that share no silicon with an earlier one first."""
    allowed = sorted(os.sched_getaffinity(0))
    first: list[int] = []
    rest: list[int] = []
    seen: set[str] = set()
    for core in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        try:
            kin = siblings.read_text().strip()
        except OSError:
            kin = str(core)
        (rest if kin in seen else first).append(core)
        seen.add(kin)
    return first + rest


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and all that came of it, those that have ended included."""
    times = [member.cpu_times() for member in family(process)]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def memory_mb(process: psutil.Process) -> float:
    """Resident megabytes: RSS of one process, PSS of several, which share pages."""
    members = family(process)
    if len(members) == 1:
        return float(process.memory_info().rss / 2**20)
    return float(sum(member.memory_full_info().pss for member in members) / 2**20)


async def until_ready(session: aiohttp.ClientSession, url: str, seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.05)


def run(
    name: str, measure: Coroutine[Any, Any, dict[str, Any]], report: Callable[[dict[str, Any]], str], to: Path | None
) -> int:
    """Measure, print the report, write the whole result to `to`. Exit code 1 with one line where that failed."""
    try:
        result = asyncio.run(measure)
    except (RuntimeError, TimeoutError, aiohttp.ClientError) as error:
        print(f"{name}: {error or type(error).__name__}", file=sys.stderr)
        return 1
    print(report(result))
    if to is not None:
        to.write_text(json.dumps(result, indent=2) + "\n")
    return 0
