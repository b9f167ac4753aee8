"""What the gateway adds: latency at one in flight and at an open-loop rate, requests per CPU-second, memory.

Starts the scripted engine (tests/fakes) and a gateway with every feature on, each in its own process, and measures the
same requests directly and through the gateway, alternating, several rounds. Nothing here is a GPU figure.

    python -m scripts.bench_gateway [--rounds 3] [--rate 200] [--seconds 8] [--json FILE]

Exit codes: 0 measured; 1 something did not start or an answer was no 200.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from gateway.keys import new_key
from scripts._bench import MODEL, free_port, percentile, process, run, until_ready

BODY = {"model": MODEL, "prompt": "the quick brown fox " * 8, "max_tokens": 16, "temperature": 0.7}


@dataclass(frozen=True)
class Latency:
    """Milliseconds."""

    p50: float
    p99: float
    requests: int


def summarize(seconds: Sequence[float]) -> Latency:
    return Latency(percentile(seconds, 0.5) * 1000, percentile(seconds, 0.99) * 1000, len(seconds))


class Load:
    """Sends one kind of request and times each to its last byte."""

    def __init__(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> None:
        self._session = session
        self._headers = {"Content-Type": "application/json", **headers}
        self._body = json.dumps(BODY).encode()

    async def one(self, url: str) -> float:
        begin = time.perf_counter()
        async with self._session.post(url, data=self._body, headers=self._headers) as answer:
            await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{url} answered {answer.status}")
        return time.perf_counter() - begin

    async def closed_loop(self, url: str, in_flight: int, count: int) -> list[float]:
        """`count` requests by `in_flight` workers, each sending its next when the last was answered."""
        left = count

        async def worker() -> list[float]:
            nonlocal left
            times = []
            while left > 0:
                left -= 1
                times.append(await self.one(url))
            return times

        return [t for times in await asyncio.gather(*(worker() for _ in range(in_flight))) for t in times]

    async def open_loop(self, url: str, rate: float, seconds: float) -> list[float]:
        """Requests leave on schedule whether or not earlier ones were answered; timed from the schedule."""
        begin = time.perf_counter()

        async def at(due: float) -> float:
            await asyncio.sleep(due - (time.perf_counter() - begin))
            await self.one(url)
            return time.perf_counter() - begin - due

        return list(await asyncio.gather(*(at(i / rate) for i in range(int(rate * seconds)))))


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    engine_port, port, admin_port = free_port(), free_port(), free_port()
    secret, digest = new_key()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "keys.json").write_text(json.dumps({"keys": [{"name": "bench", "sha256": digest}]}))
        stack.enter_context(process("tests.fakes.engine", "--port", str(engine_port), core=1))
        settings = {
            "GATEWAY_CONFIG": "configs/gateway.yaml",
            "GATEWAY__LISTEN": f"127.0.0.1:{port}",
            "GATEWAY__ADMIN_LISTEN": f"127.0.0.1:{admin_port}",
            "GATEWAY__ENGINES": json.dumps([f"http://127.0.0.1:{engine_port}"]),
            "GATEWAY__AUTH__KEYS_FILE": str(folder / "keys.json"),
        }
        gateway = stack.enter_context(process("gateway", core=0, env=settings))
        psutil.Process().cpu_affinity([1 % (os.cpu_count() or 1)])
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            load = Load(session, {"Authorization": f"Bearer {secret}"})
            urls = {
                "direct": f"http://127.0.0.1:{engine_port}/v1/completions",
                "gateway": f"http://127.0.0.1:{port}/v1/completions",
            }
            await until_ready(session, f"http://127.0.0.1:{port}/readyz")
            for url in urls.values():
                await load.closed_loop(url, 1, 300)
            rounds = []
            for number in range(arguments.rounds):
                row: dict[str, Latency] = {}
                for name, url in urls.items():
                    row[f"one_in_flight_{name}"] = summarize(await load.closed_loop(url, 1, arguments.count))
                for name, url in urls.items():
                    row[f"open_loop_{name}"] = summarize(await load.open_loop(url, arguments.rate, arguments.seconds))
                rounds.append({key: asdict(value) for key, value in row.items()})
                print(f"round {number + 1}/{arguments.rounds} done", file=sys.stderr)
            saturated = []
            for in_flight in (64, 256):
                cpu = sum(gateway.cpu_times()[:2])
                begin = time.perf_counter()
                await load.closed_loop(urls["gateway"], in_flight, arguments.count * 3)
                seconds = time.perf_counter() - begin
                used = sum(gateway.cpu_times()[:2]) - cpu
                saturated.append(
                    {
                        "in_flight": in_flight,
                        "requests_per_s": arguments.count * 3 / seconds,
                        "requests_per_cpu_s": arguments.count * 3 / used,
                    }
                )
            return {
                "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
                "rate_per_s": arguments.rate,
                "rounds": rounds,
                "added_ms": added(rounds),
                "saturated": saturated,
                "rss_mb": gateway.memory_info().rss / 2**20,
            }


def added(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Median over the rounds of (through the gateway minus directly), with the least and the most."""
    figures = {}
    for kind in ("one_in_flight", "open_loop"):
        for quantile in ("p50", "p99"):
            deltas = [r[f"{kind}_gateway"][quantile] - r[f"{kind}_direct"][quantile] for r in rounds]
            figures[f"{kind}_{quantile}"] = {
                "median": statistics.median(deltas),
                "least": min(deltas),
                "most": max(deltas),
            }
    return figures


def report(result: dict[str, Any]) -> str:
    figures = result["added_ms"]
    lines = ["| added by the gateway | median ms | least – most |", "|---|---|---|"]
    lines += [
        f"| {name.replace('_', ' ')} | {row['median']:.2f} | {row['least']:.2f} – {row['most']:.2f} |"
        for name, row in figures.items()
    ]
    saturated = result["saturated"]
    lines += ["", "| in flight | requests/s | requests per CPU-second of the gateway |", "|---|---|---|"]
    lines += [
        f"| {row['in_flight']} | {row['requests_per_s']:.0f} | {row['requests_per_cpu_s']:.0f} |" for row in saturated
    ]
    return "\n".join([*lines, "", f"gateway RSS {result['rss_mb']:.0f} MB"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=2000, help="requests a round at one in flight")
    parser.add_argument("--rate", type=float, default=200, help="open loop, requests a second")
    parser.add_argument("--seconds", type=float, default=8, help="open loop, length of a round")
    parser.add_argument("--json", type=Path, help="write the whole result here")
    arguments = parser.parse_args()
    return run("bench-gateway", measure(arguments), report, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
