"""The plan of a run, and everything it needs brought up: the source, then each party, ready before the next."""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from gateway.keys import new_key
from scripts._bench import cores, free_port, launched, until_ready
from scripts.bench_gateway import parties
from scripts.bench_gateway.load import Address

START_S = 90.0  # LiteLLM's start takes longest


@dataclass(frozen=True)
class Plan:
    """What a run does. Seconds are for one party in one round."""

    rounds: int
    seconds: float
    rate: float
    in_flight: tuple[int, ...]
    streams: int
    step_ms: float
    per_write: tuple[int, ...]
    flood: tuple[int, int]  # events of a stream, events a write
    held: int
    python: str
    peer_python: str
    peers: dict[str, str]  # their versions
    beside: str | None = None  # another checkout

    def cores(self) -> dict[str, int]:
        """Nothing on the party's core, and nothing of ours on one core where there are three."""
        own = cores()
        return {"party": own[0], "source": own[1 % len(own)], "load": own[min(2, len(own) - 1)]}

    def names(self) -> list[str]:
        return [parties.DIRECT, *parties.OURS, *([parties.BESIDE] if self.beside else []), *self.peers]


@dataclass(frozen=True)
class Runner:
    """A party that is up; `process` is None for nobody."""

    name: str
    address: Address
    process: psutil.Process | None
    share: float


class Source:
    """The process behind all of them, and its count of what it answered."""

    def __init__(self, port: int, process: psutil.Process, session: aiohttp.ClientSession) -> None:
        self.process = process
        self._url = f"http://127.0.0.1:{port}"
        self._session = session

    async def counts(self) -> dict[str, int]:
        async with self._session.get(f"{self._url}/counts") as answer:
            counts: dict[str, int] = await answer.json()
            return counts

    async def go(self) -> None:
        async with self._session.post(f"{self._url}/go") as answer:
            await answer.read()


@contextlib.asynccontextmanager
async def started(plan: Plan) -> AsyncIterator[tuple[Source, list[Runner]]]:
    """Everything up and ready. Raises RuntimeError with the last line a party printed where one is not."""
    own = plan.cores()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        port = free_port()
        engine = f"http://127.0.0.1:{port}"
        command = (sys.executable, "-m", "scripts.bench_gateway.source", "--port", str(port))
        source = stack.enter_context(launched(command, own["source"], {}, folder / "source.log"))
        await _ready(session, f"{engine}/health", source, folder / "source.log", "the source")
        runners = [Runner(parties.DIRECT, Address(port), None, 1.0)]
        for party in _parties(plan, engine, folder):
            for name, text in party.files.items():
                (folder / name).write_text(text)
            log = folder / f"{party.name}.log"
            process = stack.enter_context(launched(party.command, own["party"], party.environment, log))
            await _ready(session, f"http://127.0.0.1:{party.address.port}{party.ready}", process, log, party.name)
            runners.append(Runner(party.name, party.address, process, party.share))
        yield Source(port, source, session), runners


def _parties(plan: Plan, engine: str, folder: Path) -> list[parties.Party]:
    key = new_key()
    found = [
        parties.gateway(name, plan.python, (free_port(), free_port()), engine, folder, key, window_ms)
        for name, window_ms in ((parties.GATEWAY, 15), (parties.NO_WINDOW, 0))
    ]
    if plan.beside:
        ports = (free_port(), free_port())
        found.append(parties.gateway(parties.BESIDE, plan.python, ports, engine, folder, key, 15, plan.beside))
    if parties.ROUTER in plan.peers:
        found.append(parties.router(plan.peer_python, (free_port(), free_port()), engine))
    if parties.LITELLM in plan.peers:
        found.append(parties.litellm(plan.peer_python, free_port(), engine, folder))
    return found


async def _ready(session: aiohttp.ClientSession, url: str, process: psutil.Process, log: Path, name: str) -> None:
    ready = asyncio.ensure_future(until_ready(session, url, START_S))
    try:
        while not (await asyncio.wait({ready}, timeout=0.2))[0]:
            if process.status() == psutil.STATUS_ZOMBIE:
                raise RuntimeError(f"{name} ended at its start: {_last_line(log)}")
        ready.result()
    except TimeoutError:
        raise RuntimeError(
            f"{name} ({process.status()}) was not ready within {START_S:g} s: {_last_line(log)}"
        ) from None
    finally:
        ready.cancel()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
