"""The gateway as users run it: a process of its own, settings by environment, logs on stderr."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]


class GatewayProcess:
    """A running `python -m gateway`. `lines` are its log so far, parsed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self.unparsed: list[str] = []
        self.url = self.admin_url = ""
        self._serving = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            try:
                line = json.loads(raw)
            except ValueError:
                self.unparsed.append(raw.decode())
                continue
            self.lines.append(line)
            if line["event"] == "serving":
                self.url, self.admin_url = f"http://{line['public']}", f"http://{line['admin']}"
                self._serving.set()

    async def serving(self) -> None:
        async with asyncio.timeout(30):
            waits = {asyncio.create_task(self._serving.wait()), asyncio.create_task(self.process.wait())}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        assert self.url, f"it did not start: {self.unparsed} {self.lines}"

    async def ended(self, within_s: float = 30) -> int:
        """Its exit code; its whole log has been read then."""
        async with asyncio.timeout(within_s):
            await self._reader
            return await self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def events(self) -> list[str]:
        return [line["event"] for line in self.lines]

    def memory_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def assert_no_traceback(self) -> None:
        assert not self.unparsed, "".join(self.unparsed)
        assert not [line for line in self.lines if "exception" in line], self.lines
        assert not [line for line in self.lines if "Traceback" in line["event"]], self.lines


def environment(engines: list[str], **settings: Any) -> dict[str, str]:
    """Settings as variables: `auth__keys_file=…` is GATEWAY__AUTH__KEYS_FILE; None leaves one out."""
    chosen: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "admin_listen": "127.0.0.1:0",
        "auth__disabled": "true",
        "health__interval_s": "0.05",
        "engines": json.dumps(engines),
        **settings,
    }
    variables = {f"GATEWAY__{name.upper()}": str(value) for name, value in chosen.items() if value is not None}
    clean = {name: value for name, value in os.environ.items() if not re.match(r"gateway_", name, re.IGNORECASE)}
    return {**clean, **variables}


@contextlib.asynccontextmanager
async def started(
    engines: list[str],
    *arguments: str,
    cwd: Path = ROOT,
    program: tuple[str, ...] = ("-m", "gateway"),
    **settings: Any,
) -> AsyncIterator[GatewayProcess]:
    """Start one and leave nothing behind, however the test ends. `serving` tells when it listens."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *program,
        *arguments,
        env={"PYTHONPATH": str(ROOT), **environment(engines, **settings)},
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    gateway = GatewayProcess(process)
    try:
        yield gateway
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await gateway.ended()
