"""Whoever reads the log stands still or is gone: a blocked log driver, a pager, a closed terminal."""

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

from tests.fakes.engine import MODEL, FakeEngine
from tests.wire.conftest import free_socket, until
from tests.wire.process import ROOT, environment

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 1}


@dataclass
class Unread:
    process: asyncio.subprocess.Process
    url: str
    admin_url: str
    log: int  # the end of the pipe that nobody reads


@contextlib.asynccontextmanager
async def unread(engine: FakeEngine, client: httpx.AsyncClient) -> AsyncIterator[Unread]:
    """A ready gateway whose stderr is a pipe of one page."""
    sockets = free_socket(), free_socket()
    public, admin = (f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets)
    for sock in sockets:
        sock.close()
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    settings = environment([engine.url], listen=public, admin_listen=admin)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        env={"PYTHONPATH": str(ROOT), **settings},
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=write_end,
    )
    os.close(write_end)
    gateway = Unread(process, f"http://{public}", f"http://{admin}", read_end)

    async def is_ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await client.get(f"{gateway.url}/readyz")).status_code == 200
        return False

    try:
        await until(is_ready)
        yield gateway
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        with contextlib.suppress(OSError):
            os.close(read_end)


async def test_a_log_that_nobody_reads_stops_no_request_and_no_shutdown(engine: FakeEngine) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client, unread(engine, client) as gateway:
        for _ in range(100):
            answer = await client.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200
        assert (await client.get(f"{gateway.url}/healthz")).status_code == 200
        gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(gateway.process.wait(), 10) == 0


async def test_a_log_whose_reader_is_gone_costs_its_lines_which_are_counted(engine: FakeEngine) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client, unread(engine, client) as gateway:
        os.close(gateway.log)

        async def counted() -> bool:
            assert (await client.post(f"{gateway.url}/v1/chat/completions", json=CHAT)).status_code == 200
            page = (await client.get(f"{gateway.admin_url}/metrics")).text
            return re.search(r"^gateway_log_lines_dropped_total [1-9]", page, re.MULTILINE) is not None

        await until(counted)
        gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(gateway.process.wait(), 10) == 0
