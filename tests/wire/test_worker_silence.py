"""A worker that falls silent costs its own requests and nobody else's: it is found out and replaced."""

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.fakes.engine import FakeEngine
from tests.wire.conftest import until
from tests.wire.guarding import keys_file, with_key
from tests.wire.process import ROOT
from tests.wire.workers import ADMIN, HURRIED, Pair, pair

# What a worker can be made to do: an interpreter imports this before anything else.
FAULTS = """
import fcntl, json, os, signal, sys, time

def spin(*_):
    while True:
        pass

def sleep(*_):
    time.sleep(3600)

def stop_with_the_lock(*_):
    book = os.open(json.loads(sys.argv[1])["directory"] + "/accounts", os.O_RDWR)
    fcntl.lockf(book, fcntl.LOCK_EX)
    os.kill(os.getpid(), signal.SIGSTOP)

signal.signal(signal.SIGUSR1, spin)
signal.signal(signal.SIGUSR2, sleep)
signal.signal(signal.SIGHUP, stop_with_the_lock)
"""
# The rule's proportions, five times as quick.
QUICK = """
import gateway.silence as s
s.LOOK_S, s.SPIN_CPU_S, s.HANG_S = 0.1, 0.5, 6
from gateway.__main__ import main
main([])
"""


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "sitecustomize.py").write_text(FAULTS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    return {"program": ("-c", QUICK)}


def killed(up: Pair) -> list[tuple[int, str]]:
    told = [line for line in up.process.lines if line["event"] == "a worker is killed"]
    return [(line["worker"], line["why"].split(",")[0].split(" for ")[0]) for line in told]


@pytest.mark.parametrize(
    ("fault", "why"),
    [(signal.SIGSTOP, "stopped"), (signal.SIGUSR2, "stuck"), (signal.SIGUSR1, "busy with one thing")],
)
async def test_whatever_silences_a_worker_nobody_waits_for_it_long_and_metrics_hardly(
    engine: FakeEngine, tmp_path: Path, quick: dict[str, Any], fault: signal.Signals, why: str
) -> None:
    async with pair(engine, tmp_path, **quick) as up:
        before = up.pids()
        psutil.Process(before[1]).send_signal(fault)
        asks = [asyncio.create_task(up.ask("GET", "/healthz")) for _ in range(12)]
        asks += [asyncio.create_task(up.chat()) for _ in range(12)]
        while not killed(up):
            began = time.monotonic()
            assert await up.metric("gateway_replica_ready") == 1
            assert time.monotonic() - began < 2.5, "a scrape waited for longer than an answer may take"
        assert {answer.status_code for answer in await asyncio.gather(*asks)} == {200}
        await until(lambda: up.pids()[1] != before[1])
        assert killed(up) == [(1, why)]
        assert up.pids()[2] == before[2]


async def test_a_status_names_the_silent_worker_and_does_not_wait_for_it(engine: FakeEngine, tmp_path: Path) -> None:
    async with pair(engine, tmp_path) as up:
        victim = psutil.Process(up.pids()[2])
        victim.suspend()

        async def at_once() -> bool:
            began = time.monotonic()
            rows = (await up.status())["workers"]
            assert [row["worker"] for row in rows if not row["ready"]] == [2]
            return time.monotonic() - began < 0.5

        await until(at_once)
        victim.resume()


async def test_a_parent_that_is_stuck_costs_a_scrape_less_than_its_timeout_and_is_seen(
    engine: FakeEngine, tmp_path: Path
) -> None:
    prometheus = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yml").read_text())
    patience_s = float(prometheus["global"]["scrape_timeout"].removesuffix("s"))
    async with pair(engine, tmp_path) as up:
        parent = psutil.Process(up.process.process.pid)
        parent.suspend()
        try:
            began = time.monotonic()
            order = {"replica": engine.url, "on": False}  # which changes nothing at the one that answers
            page, status, drain = await asyncio.gather(
                up.ask("GET", "/metrics", admin=True),
                up.status(),
                up.ask("POST", "/drain", admin=True, headers=ADMIN, json=order),
            )
            assert time.monotonic() - began < patience_s - 1
        finally:
            parent.resume()
        lines = page.text.splitlines()
        assert "# worker 1 does not answer: its gauges are as they were" in lines or (
            "# worker 2 does not answer: its gauges are as they were" in lines
        )
        assert [row["reason"] for row in status["workers"] if not row["ready"]] == ["it does not answer"]
        assert (drain.status_code, status["ready"]) == (503, False)


async def test_a_page_of_metrics_names_the_worker_that_does_not_answer(engine: FakeEngine, tmp_path: Path) -> None:
    async with pair(engine, tmp_path, program=HURRIED) as up:
        assert "does not answer" not in (await up.ask("GET", "/metrics", admin=True)).text
        page = await up.page_of(1)
        assert "# worker 2 does not answer: its gauges are as they were" in page.splitlines()
        assert "gateway_workers 2.0" in page.splitlines()


async def test_a_worker_stopped_with_the_accounts_lock_does_not_take_those_along_that_wait_for_it(
    engine: FakeEngine, tmp_path: Path, quick: dict[str, Any]
) -> None:
    auth = {"auth__disabled": "false", "auth__keys_file": keys_file(tmp_path / "keys.json", few={"concurrent": 100})}
    async with pair(engine, tmp_path, **quick, **auth) as up:
        before = up.pids()
        psutil.Process(before[1]).send_signal(signal.SIGHUP)
        asks = [up.chat(headers=with_key("few")) for _ in range(12)]
        assert {answer.status_code for answer in await asyncio.gather(*asks)} == {200}
        assert killed(up) == [(1, "stopped")]
        assert up.pids()[2] == before[2]


async def test_a_worker_that_dies_while_another_is_stopped_with_the_accounts_lock_does_not_stop_the_parent(
    engine: FakeEngine, tmp_path: Path, quick: dict[str, Any]
) -> None:
    """The parent strikes out what the dead one had in flight, for which it needs the lock."""
    async with pair(engine, tmp_path, **quick) as up:
        before = up.pids()
        holder = psutil.Process(before[1])
        holder.send_signal(signal.SIGHUP)
        await until(lambda: holder.status() == psutil.STATUS_STOPPED)
        psutil.Process(before[2]).kill()
        await until(lambda: up.pids()[1] != before[1] and up.pids()[2] != before[2])
        assert killed(up) == [(1, "stopped")]

        async def served() -> bool:  # both are new, so there was none to wait for an engine behind
            return (await up.chat()).status_code == 200

        await until(served)


async def test_one_connection_to_the_admin_address_is_one_answer_so_the_next_may_come_from_another_worker(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with pair(engine, tmp_path) as up:
        answer = await up.ask("GET", "/status", admin=True, headers=ADMIN)
        assert answer.headers["connection"] == "close"
        assert json.loads(answer.content)["worker"] in ("1 of 2", "2 of 2")
        assert "connection" not in (await up.ask("GET", "/healthz")).headers
