"""The gateway over real sockets: every test gets an engine to script and a gateway to talk to."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvloop

from gateway.app import Gateway
from gateway.discovery import Resolve, resolve
from gateway.listening import bind
from gateway.serving import server
from gateway.settings import Settings
from tests.fakes.engine import MODEL, FakeEngine, Script

# Quick looks and short patience, so that faults are seen in test time. Everything else is the shipped default.
QUICK: dict[str, Any] = {
    "auth": {"disabled": True},
    "health": {"interval_s": 0.05, "timeout_s": 1, "idle_probe_s": 3600},
    "logs": {"access": False},
}

_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # reading the CA bundle takes longer than many a test


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that serves in production."""
    return {"uvloop": uvloop.new_event_loop}


@dataclass
class Running:
    """A gateway that serves, and a client for it."""

    gateway: Gateway
    url: str
    admin_url: str
    client: httpx.AsyncClient
    before: str = ""  # the metrics page that counts as zero

    async def completion(self, prompt: Any, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})

    async def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return await self.client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, **fields})

    def stream(self, text: str = "hello", **fields: Any) -> Any:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True, **fields}
        return self.client.stream("POST", "/v1/chat/completions", json=body)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of these series on the admin port, of counters what they gained; 0.0 where there is none (yet)."""
        return _sum(await self.metrics_page(), name, labels) - _sum(self.before, name, labels)

    async def metrics_page(self) -> str:
        return (await self.client.get(f"{self.admin_url}/metrics")).text

    async def settled(self) -> None:
        """Until every request has ended on the gateway's side too; then the counts must agree."""
        async with asyncio.timeout(5):
            await self.gateway.edge.idle.wait()
        self.gateway.check_integrity()
        assert self.gateway.admission.in_flight == 0, self.gateway.admission
        assert all(replica.in_flight == 0 for replica in self.gateway.replicas.all), self.gateway.replicas


def _sum(page: str, name: str, labels: dict[str, str]) -> float:
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    total = 0.0
    for line in page.splitlines():
        series, _, value = line.rpartition(" ")
        if series.split("{")[0] == name and wanted <= set(series.partition("{")[2].rstrip("}").split(",")):
            total += float(value)
    return total


async def until(holds: Callable[[], Any], within_s: float = 15) -> None:
    """Wait until `holds()` is true; it may be async."""
    async with asyncio.timeout(within_s):
        while True:
            answer = holds()
            if await answer if asyncio.iscoroutine(answer) else answer:
                return
            await asyncio.sleep(0.01)


def free_socket() -> socket.socket:
    return bind("127.0.0.1:0", "listen")


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        merged[key] = (
            merge(merged[key], value) if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
        )
    return merged


async def _stop(servers: list[Any], tasks: list[asyncio.Task[None]]) -> None:
    """At once: Uvicorn's own way out takes two ticks of 0.1 s, which is what most tests take altogether."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in servers:
        for listener in each.servers:
            listener.close()
        for connection in list(each.server_state.connections):
            connection.transport.abort()
        if requests := list(each.server_state.tasks):
            _, stuck = await asyncio.wait(requests, timeout=1)
            for task in stuck:  # a test that found a fault must end as well
                task.cancel()


@contextlib.asynccontextmanager
async def serve(
    engines: list[str], wait: bool = True, resolve: Resolve = resolve, **settings: Any
) -> AsyncIterator[Running]:
    """A gateway in this event loop, on free ports."""
    chosen = Settings(engines=tuple(engines), **merge(QUICK, settings))
    async with Gateway(chosen, resolve=resolve) as gateway:
        public, admin = free_socket(), free_socket()
        servers = [server(app, gateway.settings) for app in (gateway.public, gateway.admin)]
        tasks = [asyncio.create_task(s.serve([sock])) for s, sock in zip(servers, (public, admin), strict=True)]
        urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in (public, admin)]
        while not all(each.started for each in servers):
            await asyncio.sleep(0)
        if wait:
            async with asyncio.timeout(5):
                while not gateway.health.ready()[0]:
                    await asyncio.sleep(0.01)
        async with httpx.AsyncClient(
            base_url=urls[0], timeout=20, trust_env=False, verify=_NO_TLS, limits=httpx.Limits(max_connections=None)
        ) as client:
            try:
                yield Running(gateway, *urls, client)
                gateway.check_integrity()  # after every test, whatever fault it made
            finally:
                await _stop(servers, tasks)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


@pytest.fixture
async def up(engine: FakeEngine) -> AsyncIterator[Running]:
    """The gateway with its defaults in front of one engine."""
    async with serve([engine.url]) as running:
        yield running
        await running.settled()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[tuple[FakeEngine, Running]]:
    """One engine and one gateway for a whole module, where a start for each of hundreds of cases would be the test.

    The module has `up, engine = renewing()` and `pytestmark = pytest.mark.asyncio(loop_scope="module")`.
    """
    async with FakeEngine() as engine, serve([engine.url]) as running:
        yield engine, running


def renewing() -> tuple[Any, Any]:
    """Fixtures `up` and `engine` for a module that shares them: as good as new for each test, and left idle by it."""

    @pytest_asyncio.fixture(name="up", loop_scope="module")
    async def renewed(shared: tuple[FakeEngine, Running]) -> AsyncIterator[Running]:
        engine, running = shared
        engine.seen.clear()
        engine.scripts.clear()
        engine.counters.clear()
        engine.default = Script()
        await until(lambda: running.gateway.health.ready()[0])
        running.before = await running.metrics_page()
        yield running
        await running.settled()

    @pytest.fixture(name="engine")
    def behind(up: Running, shared: tuple[FakeEngine, Running]) -> FakeEngine:
        return shared[0]

    return renewed, behind


Serve = Callable[..., Any]
