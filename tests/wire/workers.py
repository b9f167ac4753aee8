"""A gateway of two workers for tests, and clients that see which of them answers."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.fakes.engine import MODEL, FakeEngine
from tests.wire.conftest import _NO_TLS, _sum, until
from tests.wire.process import GatewayProcess, started
from tests.wire.streams import events_of

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 1}
TOKEN = "t" * 32
ADMIN = {"Authorization": f"Bearer {TOKEN}"}
# `Pair.page_of` has one worker wait for the other, in vain.
HURRIED = ("-c", "import gateway.supervisor as s; s.TELL_S = 0.2; from gateway.__main__ import main; main([])")


class Pair:
    """A gateway of two workers. Every request has a connection of its own: the kernel deals those out."""

    def __init__(self, process: GatewayProcess) -> None:
        self.process = process

    async def ask(self, method: str, path: str, admin: bool = False, **options: Any) -> httpx.Response:
        base = self.process.admin_url if admin else self.process.url
        async with httpx.AsyncClient(trust_env=False, timeout=20, verify=_NO_TLS) as client:
            return await client.request(method, f"{base}{path}", **options)

    async def chat(self, **options: Any) -> httpx.Response:
        return await self.ask("POST", "/v1/chat/completions", json=CHAT, **options)

    async def metric(self, series: str, **labels: str) -> float:
        return _sum((await self.ask("GET", "/metrics", admin=True)).text, series, labels)

    async def page_of(self, number: int) -> str:
        """/metrics, answered by this worker: the other one does not take what comes meanwhile."""
        other = psutil.Process(self.pids()[3 - number])
        other.suspend()
        try:
            return (await self.ask("GET", "/metrics", admin=True)).text
        finally:
            other.resume()

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.ask("GET", "/status", admin=True, headers=ADMIN)).json()
        return found

    def pids(self) -> dict[int, int]:
        """Worker -> process id, of those that served last under each number."""
        lines = [line for line in self.process.lines if line["event"] == "a worker serves"]
        return {line["worker"]: line["pid"] for line in lines}

    def answered_by(self) -> Counter[int]:
        """Worker -> finished requests for inference, by the access log."""
        lines = [line for line in self.process.lines if line["event"] == "request" and "/v1/chat" in line["route"]]
        return Counter(line["worker"] for line in lines)

    async def kill(self, number: int) -> None:
        """SIGKILL, and wait for the successor."""
        before = self.pids()[number]
        psutil.Process(before).kill()
        await until(lambda: self.pids()[number] != before)


@contextlib.asynccontextmanager
async def pair(engine: FakeEngine, folder: Path, **settings: Any) -> AsyncIterator[Pair]:
    (folder / "token").write_text(TOKEN)
    chosen = {"workers": 2, "auth__admin_token_file": folder / "token", **settings}
    async with started([engine.url], **chosen) as process:
        await process.serving()
        up = Pair(process)

        async def all_ready() -> bool:
            return bool((await up.status())["ready"])

        await until(all_ready)
        yield up


def logged(up: Pair, count: int) -> bool:
    return sum(up.answered_by().values()) == count


def directories(folder: Path) -> list[Path]:
    """What gateways keep there while they run."""
    return list(folder.glob("gateway-*"))


class Stream:
    """A client that reads one stream in the background."""

    def __init__(self, up: Pair, headers: dict[str, str] | None = None) -> None:
        self.events: list[bytes] = []
        self.status = 0
        self.began = asyncio.Event()
        self.task = asyncio.create_task(self._read(f"{up.process.url}/v1/chat/completions", headers or {}))

    async def _read(self, url: str, headers: dict[str, str]) -> None:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=20, verify=_NO_TLS) as client,
            client.stream("POST", url, json={**CHAT, "stream": True}, headers=headers) as answer,
        ):
            self.status = answer.status_code

            async def noted() -> AsyncIterator[bytes]:
                async for chunk in answer.aiter_bytes():
                    self.began.set()
                    yield chunk

            self.events = await events_of(noted())
            self.began.set()
