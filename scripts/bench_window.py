"""Does the micro-batching window pay? The same short completions through two gateways, one with the shipped window, one
with window 0, alternating, on a running engine or on the scripted one.

    python -m scripts.bench_window [--engine http://127.0.0.1:8000] [--in-flight 16 64] [--seconds 10] [--rounds 3]

Exit codes: 0 measured; 1 something did not start or an answer was no 200.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from scripts._bench import free_port, percentile, process, run, until_ready
from scripts._command import Parser, web_address

WINDOWS_MS = (15, 0)
ANSWER_TOKENS = 16


async def load(session: aiohttp.ClientSession, url: str, model: str, in_flight: int, seconds: float) -> list[float]:
    """Closed loop: each of `in_flight` clients sends its next when the last was answered. Latencies, s."""
    end = time.perf_counter() + seconds
    numbers = itertools.count()

    async def client() -> list[float]:
        times = []
        while (begin := time.perf_counter()) < end:
            # A fresh prompt each time, or the prefix cache and coalescing would be measured instead.
            prompt = f"{begin} {next(numbers)}: write one sentence about the sea."
            body = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0.7}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                await answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"{url} answered {answer.status}")
            times.append(time.perf_counter() - begin)
        return times

    return [t for times in await asyncio.gather(*(client() for _ in range(in_flight))) for t in times]


async def served_model(session: aiohttp.ClientSession, engine: str) -> str:
    async with session.get(f"{engine}/v1/models") as answer:
        return str((await answer.json())["data"][0]["id"])


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        engine = arguments.engine
        if engine is None:
            port = free_port()
            engine = f"http://127.0.0.1:{port}"
            stack.enter_context(process("tests.fakes.engine", "--port", str(port), core=1))
        gateways = {}
        for window_ms in WINDOWS_MS:
            public = free_port()
            settings = {
                "GATEWAY_CONFIG": "configs/gateway.yaml",
                "GATEWAY__LISTEN": f"127.0.0.1:{public}",
                "GATEWAY__ADMIN_LISTEN": f"127.0.0.1:{free_port()}",
                "GATEWAY__ENGINES": json.dumps([engine]),
                "GATEWAY__AUTH__DISABLED": "true",
                "GATEWAY__BATCHING__WINDOW_MS": str(window_ms),
            }
            stack.enter_context(process("gateway", core=0, env=settings))
            gateways[window_ms] = f"http://127.0.0.1:{public}"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for url in gateways.values():
                await until_ready(session, f"{url}/readyz")
            model = await served_model(session, engine)
            rows = []
            for in_flight in arguments.in_flight:
                rounds: dict[int, list[list[float]]] = {window_ms: [] for window_ms in WINDOWS_MS}
                for number in range(arguments.rounds):
                    # Whoever goes first alternates: what warms up must not always favour the second.
                    for window_ms in WINDOWS_MS if number % 2 == 0 else reversed(WINDOWS_MS):
                        url = gateways[window_ms]
                        rounds[window_ms].append(await load(session, url, model, in_flight, arguments.seconds))
                    print(f"{in_flight} in flight: round {number + 1}/{arguments.rounds} done", file=sys.stderr)
                rows += [
                    summary(in_flight, window_ms, rounds[window_ms], arguments.seconds) for window_ms in WINDOWS_MS
                ]
            return {"model": model, "scripted_engine": arguments.engine is None, "rows": rows}


def summary(in_flight: int, window_ms: int, rounds: Sequence[Sequence[float]], seconds: float) -> dict[str, Any]:
    rates = [len(times) / seconds for times in rounds]
    return {
        "in_flight": in_flight,
        "window_ms": window_ms,
        "requests_per_s": {"median": statistics.median(rates), "least": min(rates), "most": max(rates)},
        "p50_ms": statistics.median(percentile(times, 0.5) for times in rounds) * 1000,
        "p99_ms": statistics.median(percentile(times, 0.99) for times in rounds) * 1000,
    }


def report(result: dict[str, Any]) -> str:
    lines = [
        "| in flight | window ms | requests/s, median (least – most) | p50 ms | p99 ms |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        rate = row["requests_per_s"]
        span = f"{rate['median']:.1f} ({rate['least']:.1f} – {rate['most']:.1f})"
        cells = (row["in_flight"], row["window_ms"], span, f"{row['p50_ms']:.0f}", f"{row['p99_ms']:.0f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    parser = Parser("bench-window", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engine", type=web_address, help="base URL of a running engine; without it the scripted one is started"
    )
    parser.add_argument("--in-flight", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--seconds", type=float, default=10, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the whole result here")
    arguments = parser.parse_args()
    return run("bench-window", measure(arguments), report, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
