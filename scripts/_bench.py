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

from scripts._children import die_with_parent

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
    """A child pinned to one core, ended with the block, or with us however we end."""
    child = subprocess.Popen(
        [sys.executable, "-m", *command],
        env={**os.environ, **(env or {})},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=die_with_parent(),
    )
    handle = psutil.Process(child.pid)
    handle.cpu_affinity([core % (os.cpu_count() or 1)])
    try:
        yield handle
    finally:
        child.terminate()
        child.wait(10)


async def until_ready(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
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
