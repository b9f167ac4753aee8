"""What several worker processes cost, and what they give, on the cores that there are.

    python -m scripts.bench_workers [--workers 2] [--in-flight 64] [--seconds 4] [--rounds 3] [--window-ms 15]
                                    [--json FILE]

The same short completions through three gateways in turn, each with every feature on: one process on one core; so many
workers on that same core, which shows what being several costs; and the workers on a core each. Where the machine has
no cores left for the load and the engine, the last shares with them and is no figure of scaling: the report says so.

Exit codes: 0 measured; 1 something did not start, or an answer was wrong; 2 wrong usage.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from gateway.keys import new_key
from gateway.wording import several
from scripts._bench import cores, cpu_s, free_port, launched, memory_mb, percentile, run, until_ready
from scripts._children import Terminated, raise_on_termination
from scripts.bench_gateway import parties
from scripts.bench_gateway.load import Address, Load, LoadError
from scripts.bench_gateway.source import CAPACITY_TOKENS


@dataclass(frozen=True)
class Case:
    """One gateway: how many workers, on which cores."""

    name: str
    workers: int
    cores: tuple[int, ...]


def plan(workers: int, own: list[int]) -> tuple[list[Case], int]:
    """The cases, and the core of engine and load: the last one there is."""
    spread = tuple(own[number % len(own)] for number in range(workers))
    cases = [
        Case("one process, one core", 1, tuple(own[:1])),
        Case(f"{several(workers, 'worker')}, the same core", workers, tuple(own[:1])),
        Case(f"{several(workers, 'worker')}, {several(len(set(spread)), 'core')}", workers, spread),
    ]
    return cases, own[-1]


@contextlib.asynccontextmanager
async def up(case: Case, engine: str, folder: Path, window_ms: float) -> AsyncIterator[tuple[Address, psutil.Process]]:
    """A gateway of this case, ready. One that lets every request through: what is measured is not its queue."""
    ports = free_port(), free_port()
    party = parties.gateway(parties.GATEWAY, sys.executable, ports, engine, folder, new_key(), window_ms)
    for name, text in party.files.items():
        (folder / name).write_text(text)
    variables = {**party.environment, "GATEWAY__WORKERS": str(case.workers)}
    async with aiohttp.ClientSession() as session:
        with launched(party.command, case.cores[0], variables, folder / "log") as process:
            await until_ready(session, f"http://127.0.0.1:{ports[0]}/readyz")
            async with asyncio.timeout(30):
                await _all_at_work(session, f"http://127.0.0.1:{ports[1]}/metrics")
            for number, child in enumerate(process.children()):
                child.cpu_affinity([case.cores[number % len(case.cores)]])
            yield party.address, process


async def _all_at_work(session: aiohttp.ClientSession, url: str) -> None:
    """Until every worker has its share of what the engine holds: the shares add up to it."""
    while True:
        async with session.get(url) as answer:
            lines = (await answer.text()).splitlines()
        told = [float(line.split()[1]) for line in lines if line.startswith("gateway_capacity_tokens ")]
        if told == [CAPACITY_TOKENS]:
            return
        await asyncio.sleep(0.05)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    cases, other = plan(options.workers, cores())
    os.sched_setaffinity(0, {other})
    rows: dict[str, list[dict[str, float]]] = {case.name: [] for case in cases}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = free_port()
        command = (sys.executable, "-m", "scripts.bench_gateway.source", "--port", str(port))
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(launched(command, other, {}, folder / "source.log"))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            await until_ready(session, f"http://127.0.0.1:{port}/health")
            for number in range(options.rounds):
                for case in cases:
                    made = Path(tempfile.mkdtemp(dir=name))
                    async with up(case, f"http://127.0.0.1:{port}", made, options.window_ms) as (address, process):
                        rows[case.name].append(await one(address, process, options))
                print(f"round {number + 1}/{options.rounds} done", file=sys.stderr)
    shared = other in {core for case in cases for core in case.cores}
    return {
        "in_flight": options.in_flight,
        "window_ms": options.window_ms,
        "cores": os.cpu_count(),
        "shared": shared,
        "cases": rows,
    }


async def one(address: Address, process: psutil.Process, options: argparse.Namespace) -> dict[str, float]:
    async with Load(address) as load:
        await load.closed_loop(options.in_flight, 1)
        begin = spent_s(process)
        times = await load.closed_loop(options.in_flight, options.seconds)
        spent = {pid: seconds - begin[pid] for pid, seconds in spent_s(process).items()}
    serving = [seconds for pid, seconds in spent.items() if pid != process.pid] or [spent[process.pid]]
    return {
        "requests_per_s": len(times) / options.seconds,
        "requests_per_cpu_s": len(times) / sum(spent.values()),
        "p50_ms": percentile(times, 0.5) * 1e3,
        "p99_ms": percentile(times, 0.99) * 1e3,
        "busiest_share": max(serving) / sum(serving),
        "memory_mb": memory_mb(process),
    }


def spent_s(process: psutil.Process) -> dict[int, float]:
    """CPU seconds so far of the gateway's processes, by their ids: the parent's own are the rest of the whole."""
    own = {child.pid: cpu_s(child) for child in process.children()}
    return {**own, process.pid: cpu_s(process) - sum(own.values())}


def report(result: dict[str, Any]) -> str:
    names = list(next(iter(result["cases"].values()))[0])
    lines = [f"| {result['in_flight']} in flight | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for case, rows in result["cases"].items():
        figures = [[row[name] for row in rows] for name in names]
        told = [f"{statistics.median(f):.4g} ({min(f):.4g} – {max(f):.4g})" for f in figures]
        lines.append(f"| {case} | {' | '.join(told)} |")
    if result["shared"]:
        lines.append("Engine and load ran on a core of the gateway's: the last row is no figure of scaling.")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m scripts.bench_workers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--window-ms", type=float, default=15, help="0: nothing is merged")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the whole result here")
    options = parser.parse_args(arguments)
    if min(options.workers - 1, options.in_flight, options.seconds, options.rounds) <= 0:
        parser.error("every number must be above 0, and workers above 1")
    raise_on_termination()
    try:
        return run("bench-workers", measure(options), report, options.json)
    except LoadError as error:
        print(f"bench-workers: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Terminated):
        return 1


if __name__ == "__main__":
    sys.exit(main())
