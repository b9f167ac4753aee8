"""The measuring: every party up at once on one core, source and load elsewhere; then round by round, kind by kind, each
party in turn, so that whatever the machine does besides hits all of them.
"""

import asyncio
import contextlib
import json
import platform
import resource
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from scripts._bench import cpu_s, memory_mb, percentile
from scripts.bench_gateway import parties
from scripts.bench_gateway.load import Load, LoadError
from scripts.bench_gateway.starting import Plan, Runner, Source, started

HELD_EVENTS = 2
SETTLE_S = 3.0  # after a peer failed, until what it had begun is over

Row = dict[str, Any]
Work = Callable[[Runner, Load], Awaitable[Row]]


class Bench:
    """Measures parties that are up."""

    def __init__(self, plan: Plan, source: Source, runners: Sequence[Runner]) -> None:
        self._plan = plan
        self._source = source
        self._runners = runners

    async def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        idle = {}
        for runner in self._runners:
            async with Load(runner.address) as load:  # the first requests import, connect and compile
                await load.closed_loop(4, 0.5)
                await load.streams(4, 20, 1, 1)
            if runner.process is not None:
                idle[runner.name] = memory_mb(runner.process)
        rounds = []
        for number in range(self._plan.rounds):
            begin = time.monotonic()
            rounds.append(await self._round())
            say(f"round {number + 1}/{self._plan.rounds} took {time.monotonic() - begin:.0f} s")
        return {"idle_mb": idle, "rounds": rounds}

    async def _round(self) -> dict[str, dict[str, Row]]:
        found: dict[str, dict[str, Row]] = {runner.name: {} for runner in self._runners}
        for kind, work in self._kinds().items():
            for runner in self._runners:
                try:
                    found[runner.name][kind] = await self._held_to_account(runner, work)
                except LoadError as error:
                    if runner.name not in parties.PEERS:
                        raise RuntimeError(f"{runner.name}, {kind}: {error}; the figures are void") from None
                    found[runner.name][kind] = {"failed": str(error)}  # a peer's is no figure, and told of
                    await self._source.go()
                    await asyncio.sleep(SETTLE_S)
        return found

    def _kinds(self) -> dict[str, Work]:
        plan = self._plan
        kinds: dict[str, Work] = {
            "one_in_flight": lambda _, load: _whole(load.closed_loop(1, plan.seconds)),
            "open_loop": lambda _, load: _whole(load.open_loop(plan.rate, plan.seconds * 2)),
        }
        kinds |= {f"in_flight_{count}": self._saturate(count) for count in plan.in_flight}
        kinds |= {f"events_{per_write}": self._streams(per_write) for per_write in plan.per_write}
        return {**kinds, "flood": self._flood, "held": self._memory}

    async def _held_to_account(self, runner: Runner, work: Work) -> Row:
        """One party's phase, with everybody's CPU time, and the source's count against the load's."""
        processes = {"source": self._source.process}
        if runner.process is not None:
            processes["party"] = runner.process
        async with Load(runner.address) as load:
            await load.connect(1)
            before, begin = await self._source.counts(), time.perf_counter()
            own = time.process_time()
            used = {name: cpu_s(process) for name, process in processes.items()}
            row = await work(runner, load)
            used = {name: cpu_s(process) - used[name] for name, process in processes.items()}
            used["load"] = time.process_time() - own
            wall_s = time.perf_counter() - begin
            after = await self._source.counts()
        for unit in ("prompts", "streams", "events"):
            served = after[unit] - before[unit]
            if served != row.get(unit, 0):
                raise LoadError(f"{row.get(unit, 0)} {unit} were answered, and the source served {served}")
        row |= {"wall_s": wall_s, "cpu_s": used, "calls": after["calls"] - before["calls"]}
        done = row.get("events") or row.get("prompts")
        if done and used.get("party"):
            row["per_cpu_s"] = done / used["party"]
        return row

    def _saturate(self, in_flight: int) -> Work:
        return lambda _, load: _whole(load.closed_loop(in_flight, self._plan.seconds))

    def _streams(self, per_write: int) -> Work:
        plan = self._plan

        async def work(runner: Runner, load: Load) -> Row:
            steps = max(2, int(plan.seconds * 1000 / plan.step_ms * runner.share))
            reads = await load.streams(plan.streams, steps * per_write, per_write, plan.step_ms)
            events = plan.streams * steps * per_write
            return {"streams": plan.streams, "events": events, "events_a_read": events / reads}

        return work

    async def _flood(self, runner: Runner, load: Load) -> Row:
        """Streams as fast as they are taken: reads then hold what many writes brought."""
        length, per_write = self._plan.flood
        length = max(per_write, int(length * runner.share))
        reads = await load.streams(self._plan.streams, length, per_write, 0)
        events = self._plan.streams * length
        return {"streams": self._plan.streams, "events": events, "events_a_read": events / reads}

    async def _memory(self, runner: Runner, load: Load) -> Row:
        ends = await load.hold(self._plan.held, HELD_EVENTS)
        held = (await self._source.counts())["held"]
        if held != self._plan.held:
            raise LoadError(f"{self._plan.held} streams are open, and the source holds {held}")
        row: Row = {"streams": held, "events": held * HELD_EVENTS}
        if runner.process is not None:
            row["memory_mb"] = memory_mb(runner.process)
        await self._source.go()
        await load.ended(ends)
        return row


async def _whole(work: Awaitable[list[float]]) -> Row:
    times = await work
    return {
        "prompts": len(times),
        "p50_ms": percentile(times, 0.5) * 1000,
        "p99_ms": percentile(times, 0.99) * 1000,
    }


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "cpus": psutil.cpu_count(),
        "processor": names[0] if names else platform.machine(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "busy_before": psutil.cpu_percent(0.5) / 100,  # by others; the run was not alone where this is much above 0
    }


def _cpuinfo() -> list[str]:
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text().splitlines()
    return []


async def measure(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < 3 * plan.held:
        raise RuntimeError(f"{plan.held} open streams need about {3 * plan.held} open files; the limit is {hard}")
    told = machine()
    begin = time.monotonic()
    async with started(plan) as (source, runners):
        psutil.Process().cpu_affinity([plan.cores()["load"]])
        await asyncio.sleep(1.0)
        result = await Bench(plan, source, runners).run(say)
    beside = {parties.BESIDE: _commit(Path(plan.beside))} if plan.beside else {}
    return {
        "machine": told,
        "cores": plan.cores(),
        "versions": {"gateway": _commit(Path()), **beside, **plan.peers},
        "plan": {key: value for key, value in vars(plan).items() if key not in _UNTOLD},
        **result,
        "took_s": time.monotonic() - begin,
    }


_UNTOLD = ("python", "peer_python", "peers", "beside")


def _commit(tree: Path) -> str:
    """The gateway's commit, or what stands in the file COMMIT beside it where the tree came without its history."""
    with contextlib.suppress(OSError):
        return (tree / "COMMIT").read_text().strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
        return subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def dump(result: dict[str, Any], to: Path) -> Path:
    """Write a run's result; in a folder, under the name that docs/benchmarks uses."""
    if to.is_dir():
        to = to / f"gateway-peers.{result['machine']['cpus']}-core.json"
    to.write_text(json.dumps(result, indent=1) + "\n")
    return to
