"""Soak: an hour of a thousand open streams, then ten minutes of ten times too much. Does anything grow or drift?

Starts the scripted engine and a gateway with the shipped settings, in processes of their own.

1. `--streams` streams, one token a second each, reopened as they end, for `--stream-s`.
2. requests at `--overload` times what the engine serves, open loop, for `--overload-s`.

Fails (exit code 1) when a stream broke, a refusal lacked its Retry-After, memory grew by more than `--slope` MB an hour
over the second half of the streams, or anything is still counted as in flight at the end. Prints and writes JSON.

    python -m scripts.soak --json docs/benchmarks/soak.json
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from scripts._bench import MODEL, free_port, percentile, process, until_ready
from scripts._command import Parser

TOKEN_S = 1.0
STREAM_TOKENS = 60
SERVICE_S = 0.2
SLOTS = 20  # with SERVICE_S, 100 requests a second


@dataclass
class Counts:
    """What clients saw."""

    streams: Counter[str] = field(default_factory=Counter)
    overload: Counter[str] = field(default_factory=Counter)
    refusal_s: list[float] = field(default_factory=list)
    served_s: list[float] = field(default_factory=list)
    without_retry_after: int = 0


async def one_stream(
    session: aiohttp.ClientSession, url: str, number: int, counts: Counts, stop: asyncio.Event
) -> None:
    """One client after another in one seat, until told to stop."""
    serial = 0
    while not stop.is_set():
        serial += 1
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"seat {number} client {serial}"}],
            "stream": True,
            "max_tokens": STREAM_TOKENS,
        }
        last = b""
        try:
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                async for chunk in answer.content.iter_any():
                    last = (last + chunk)[-64:]
                    if stop.is_set():
                        break
                whole = last.endswith(b"data: [DONE]\n\n")
                outcome = "whole" if whole else "cut by us" if stop.is_set() else f"broken ({answer.status})"
        except aiohttp.ClientError as error:
            outcome = type(error).__name__
        counts.streams[outcome] += 1


async def one_request(session: aiohttp.ClientSession, url: str, number: int, counts: Counts) -> None:
    body = {"model": MODEL, "prompt": f"overload {number}", "max_tokens": 200}
    begin = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            await answer.read()
            took = time.perf_counter() - begin
            counts.overload[str(answer.status)] += 1
            if answer.status == 429:
                counts.refusal_s.append(took)
                counts.without_retry_after += "Retry-After" not in answer.headers
            elif answer.status == 200:
                counts.served_s.append(took)
    except aiohttp.ClientError as error:
        counts.overload[type(error).__name__] += 1


async def overload(session: aiohttp.ClientSession, url: str, rate: float, seconds: float, counts: Counts) -> None:
    """Open loop: requests leave on schedule whatever became of the earlier ones."""
    begin = time.perf_counter()
    tasks: set[asyncio.Task[None]] = set()
    for number in range(int(rate * seconds)):
        delay = number / rate - (time.perf_counter() - begin)
        if delay > 0:
            await asyncio.sleep(delay)
        task = asyncio.create_task(one_request(session, url, number, counts))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


class Memory:
    """RSS of the gateway over time, MB."""

    def __init__(self, running: "Running") -> None:
        self._running = running
        self.samples: list[tuple[float, float]] = []

    async def watch(self) -> None:
        begin = time.monotonic()
        while True:
            self.samples.append((time.monotonic() - begin, self._running.rss_mb()))
            await asyncio.sleep(5)

    def slope_mb_per_h(self) -> float:
        """Least squares over the second half: the first warms caches and buffers up."""
        half = self.samples[len(self.samples) // 2 :]
        if len(half) < 2:
            return 0.0
        mean_t = sum(t for t, _ in half) / len(half)
        mean_m = sum(m for _, m in half) / len(half)
        spread = sum((t - mean_t) ** 2 for t, _ in half)
        return 3600 * sum((t - mean_t) * (m - mean_m) for t, m in half) / spread


@dataclass
class Running:
    """A gateway under soak."""

    process: psutil.Process
    url: str
    admin: str
    token: str
    session: aiohttp.ClientSession

    def rss_mb(self) -> float:
        return float(round(self.process.memory_info().rss / 2**20, 1))

    def cpu_s(self) -> float:
        return float(sum(self.process.cpu_times()[:2]))

    async def admission(self) -> dict[str, Any]:
        async with self.session.get(
            f"{self.admin}/status", headers={"Authorization": f"Bearer {self.token}"}
        ) as answer:
            figures: dict[str, Any] = (await answer.json())["admission"]
            return figures


@contextlib.asynccontextmanager
async def gateway(engine_url: str, capacity_tokens: int, max_in_flight: int) -> AsyncIterator[Running]:
    """The shipped settings but for what the scripted engine can't tell."""
    port, admin_port, token = free_port(), free_port(), "soak-admin-token-of-this-run"
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "token"
        token_file.write_text(token)
        settings = {
            "GATEWAY_CONFIG": "configs/gateway.yaml",
            "GATEWAY__LISTEN": f"127.0.0.1:{port}",
            "GATEWAY__ADMIN_LISTEN": f"127.0.0.1:{admin_port}",
            "GATEWAY__ENGINES": json.dumps([engine_url]),
            "GATEWAY__AUTH__DISABLED": "true",
            "GATEWAY__AUTH__ADMIN_TOKEN_FILE": str(token_file),
            "GATEWAY__ADMISSION__CAPACITY_TOKENS": str(capacity_tokens),
            "GATEWAY__ADMISSION__MAX_IN_FLIGHT": str(max_in_flight),
        }
        with process("gateway", core=0, env=settings) as child:
            url, admin = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
                await until_ready(session, f"{url}/readyz")
                yield Running(child, url, admin, token, session)


async def soak_streams(engine_url: str, streams: int, seconds: float) -> dict[str, Any]:
    counts = Counts()
    async with gateway(engine_url, capacity_tokens=streams * 200, max_in_flight=streams + 100) as running:
        idle_mb = running.rss_mb()
        memory = Memory(running)
        watcher = asyncio.create_task(memory.watch())
        stop = asyncio.Event()
        seats = [asyncio.create_task(one_stream(running.session, running.url, i, counts, stop)) for i in range(streams)]
        cpu_s = running.cpu_s()
        await asyncio.sleep(seconds)
        share = (running.cpu_s() - cpu_s) / seconds
        open_now = (await running.admission())["in_flight"]
        watcher.cancel()
        stop.set()
        await asyncio.gather(*seats)
        left = await emptied(running)
    return {
        "open": streams,
        "seconds": seconds,
        "seen_open_at_the_end": open_now,
        "outcomes": dict(counts.streams),
        "gateway_cpu_share": round(share, 3),
        "rss_mb": {"idle": idle_mb, "peak": max(mb for _, mb in memory.samples), "end": memory.samples[-1][1]},
        "rss_slope_mb_per_h": round(memory.slope_mb_per_h(), 2),
        "left": left,
    }


async def soak_overload(engine_url: str, times: float, seconds: float) -> dict[str, Any]:
    counts = Counts()
    # Room for what the engine works on at a time, about 230 tokens each.
    async with gateway(engine_url, capacity_tokens=SLOTS * 230, max_in_flight=1024) as running:
        memory = Memory(running)
        watcher = asyncio.create_task(memory.watch())
        await overload(running.session, running.url, times * SLOTS / SERVICE_S, seconds, counts)
        watcher.cancel()
        left = await emptied(running)
    return {
        "times_capacity": times,
        "seconds": seconds,
        "outcomes": dict(counts.overload),
        "without_retry_after": counts.without_retry_after,
        "refusal_ms": _quantiles(counts.refusal_s),
        "served_ms": _quantiles(counts.served_s),
        "rss_mb": {"peak": max(mb for _, mb in memory.samples), "end": memory.samples[-1][1]},
        "rss_slope_mb_per_h": round(memory.slope_mb_per_h(), 2),
        "left": left,
    }


async def emptied(running: Running) -> dict[str, int]:
    """What is still counted once clients are gone and the gateway had ten seconds to notice."""
    left: dict[str, int] = {}
    for _ in range(100):
        figures = await running.admission()
        left = {key: figures[key] for key in ("in_flight", "in_flight_tokens", "queued", "queued_tokens")}
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    return left


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    port = free_port()
    engine = ("tests.fakes.engine", "--port", str(port), "--token-s", str(TOKEN_S), "--service-s", str(SERVICE_S))
    url = f"http://127.0.0.1:{port}"
    with process(*engine, "--slots", str(SLOTS), core=1):
        streams = await soak_streams(url, arguments.streams, arguments.stream_s)
        print(json.dumps(streams), file=sys.stderr)
        return {"streams": streams, "overload": await soak_overload(url, arguments.overload, arguments.overload_s)}


def _quantiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{int(q * 100)}": round(percentile(seconds, q) * 1000, 2) for q in (0.5, 0.99)}


def verdict(result: dict[str, Any], slope_limit: float) -> list[str]:
    """What went wrong; empty if nothing did."""
    wrong = []
    broken = {k: v for k, v in result["streams"]["outcomes"].items() if k not in ("whole", "cut by us")}
    if broken:
        wrong.append(f"streams ended otherwise than whole: {broken}")
    if result["streams"]["rss_slope_mb_per_h"] > slope_limit:
        wrong.append(f"memory grew by {result['streams']['rss_slope_mb_per_h']} MB an hour")
    wrong += [
        f"left after {phase}: {figures['left']}" for phase, figures in result.items() if any(figures["left"].values())
    ]
    if set(result["overload"]["outcomes"]) - {"200", "429"}:
        wrong.append(f"overload was answered {result['overload']['outcomes']}")
    if result["overload"]["without_retry_after"]:
        wrong.append("refusals without Retry-After")
    return wrong


def main() -> int:
    parser = Parser("soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--stream-s", type=float, default=3600)
    parser.add_argument("--overload", type=float, default=10, help="times what the engine serves")
    parser.add_argument("--overload-s", type=float, default=600)
    parser.add_argument("--slope", type=float, default=5.0, help="MB an hour that count as standing still")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    result = asyncio.run(run(arguments))
    wrong = verdict(result, arguments.slope)
    result["verdict"] = wrong or "held"
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
