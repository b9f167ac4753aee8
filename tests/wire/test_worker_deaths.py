"""A worker or the whole gateway ends: what is lost, what is not, and who takes over."""

import asyncio
import signal
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.engine import FakeEngine, Script
from tests.wire.conftest import until
from tests.wire.guarding import keys_file, with_key
from tests.wire.workers import Stream, directories, logged, pair


async def test_a_restarted_workers_counts_go_on_and_its_gauges_do_not(engine: FakeEngine, tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with pair(engine, tmp_path) as up:
        assert {(await up.chat()).status_code for _ in range(30)} == {200}
        await until(lambda: logged(up, 30))
        engine.default = Script(
            pieces=[b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n', hold, b"data: [DONE]\n\n"]
        )
        streams = [Stream(up) for _ in range(12)]
        await asyncio.gather(*(stream.began.wait() for stream in streams))
        assert await up.metric("gateway_in_flight_requests") == 12
        lost = next(row["in_flight"] for row in (await up.status())["workers"] if row["worker"] == 2)
        assert 0 < lost < 12
        await up.kill(2)
        assert await up.metric("gateway_worker_restarts_total") == 1
        for _ in range(6):
            assert await up.metric("gateway_workers") == await up.metric("gateway_setting", name="workers") == 2
            assert await up.metric("gateway_requests_total", route="/v1/chat/completions") == 30
            assert await up.metric("gateway_in_flight_requests") == 12 - lost
        streams += (more := [Stream(up) for _ in range(12)])
        await asyncio.gather(*(stream.began.wait() for stream in more))
        lost_again = next(row["in_flight"] for row in (await up.status())["workers"] if row["worker"] == 2)
        psutil.Process(up.pids()[2]).kill()  # the second time it is away for a second
        await until(lambda: up.process.events().count("a worker ended") == 2)
        assert await up.metric("gateway_in_flight_requests") == 24 - lost - lost_again
        assert await up.metric("gateway_workers") == 1
        assert await up.metric("gateway_requests_total", route="/v1/chat/completions") == 30
        hold.set()
        done = await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
        assert sum(isinstance(each, httpx.HTTPError) for each in done) == lost + lost_again


async def test_a_worker_killed_under_load_costs_only_what_it_had_in_flight_and_is_back_in_seconds(
    engine: FakeEngine, tmp_path: Path
) -> None:
    engine.service_s = 0.02
    async with pair(engine, tmp_path) as up:
        statuses: Counter[int] = Counter()
        broken: list[float] = []
        over = asyncio.Event()

        async def client() -> None:
            while not over.is_set():
                try:
                    statuses[(await up.chat()).status_code] += 1
                except httpx.HTTPError:
                    broken.append(time.monotonic())

        clients = [asyncio.create_task(client()) for _ in range(8)]
        await until(lambda: statuses[200] > 50)
        before = up.pids()
        killed_at = time.monotonic()
        psutil.Process(before[1]).kill()
        await until(lambda: up.pids()[1] != before[1])
        back_s = time.monotonic() - killed_at
        then = statuses[200]
        await until(lambda: statuses[200] > then + 50)
        over.set()
        await asyncio.gather(*clients)
        assert back_s < 6, back_s  # 0.7 to 0.9 s where nothing else runs (docs/decisions/0008)
        assert up.pids()[2] == before[2]
        assert statuses.keys() == {200}, statuses
        assert len(broken) <= 8
        assert all(at - killed_at < 1 for at in broken), broken
        told = [line for line in up.process.lines if line["event"] == "a worker ended"]
        assert [(line["worker"], line["why"]) for line in told] == [(1, "SIGKILL")]
        counted = await up.metric("gateway_requests_total", route="/v1/chat/completions", status="200")
        assert statuses[200] - 8 <= counted <= statuses[200]


async def test_connections_dealt_to_a_worker_that_died_are_answered_by_its_successor(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with pair(engine, tmp_path) as up:
        victim = psutil.Process(up.pids()[1])
        victim.suspend()
        asks = [asyncio.create_task(up.chat()) for _ in range(24)]
        await until(lambda: sum(ask.done() for ask in asks) > 3)
        _, waiting = await asyncio.wait(asks, timeout=0.5)
        assert len(waiting) > 3
        victim.kill()
        assert {answer.status_code for answer in await asyncio.gather(*asks)} == {200}


async def test_at_sigterm_both_workers_finish_their_streams_and_nothing_is_left(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    engine.default = Script(token_s=0.2)
    async with pair(engine, tmp_path) as up:
        children = psutil.Process(up.process.process.pid).children()
        assert len(children) == 2
        assert len(directories(tmp_path)) == 1
        streams = [Stream(up) for _ in range(10)]
        await asyncio.gather(*(stream.began.wait() for stream in streams))
        rows = (await up.status())["workers"]
        assert all(row["in_flight"] for row in rows), rows
        up.process.signal(signal.SIGTERM)
        await until(lambda: up.process.events().count("draining") == 2)
        refused = [await up.chat() for _ in range(6)]
        assert {answer.status_code for answer in refused} == {503}
        assert not any(stream.task.done() for stream in streams)
        await asyncio.gather(*(stream.task for stream in streams))
        assert {stream.events[-1] for stream in streams} == {b"[DONE]"}
        assert await up.process.ended(10) == 0
        assert up.process.events()[-1] == "stopped"
        assert not any(child.is_running() for child in children)
        assert not directories(tmp_path)
        up.process.assert_no_traceback()


async def test_while_one_worker_ends_its_stream_nobody_is_left_waiting_for_the_one_that_is_gone(
    engine: FakeEngine, tmp_path: Path
) -> None:
    engine.default = Script(token_s=0.5)
    async with pair(engine, tmp_path) as up:
        pids = up.pids()
        stream = Stream(up)
        await stream.began.wait()
        up.process.signal(signal.SIGTERM)
        await until(lambda: sum(psutil.pid_exists(pid) for pid in pids.values()) == 1)
        refused = await asyncio.wait_for(asyncio.gather(*(up.chat() for _ in range(16))), 2)
        assert {answer.status_code for answer in refused} == {503}
        assert not stream.task.done()
        await stream.task
        assert stream.events[-1] == b"[DONE]"
        assert await up.process.ended(10) == 0


async def test_a_parent_that_is_killed_takes_its_workers_along_and_the_next_gateway_tidies_up(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with pair(engine, tmp_path) as up:
        children = psutil.Process(up.process.process.pid).children()
        up.process.signal(signal.SIGKILL)
        gone, alive = await asyncio.to_thread(psutil.wait_procs, children, 5)
        assert (len(gone), alive) == (2, [])
    (left,) = directories(tmp_path)
    async with pair(engine, tmp_path):
        (new,) = directories(tmp_path)
        assert new != left


async def test_a_worker_for_which_there_is_no_descriptor_is_started_when_there_is(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with pair(engine, tmp_path) as up:
        before = up.pids()[2]
        parent = psutil.Process(up.process.process.pid)
        limits = parent.rlimit(psutil.RLIMIT_NOFILE)
        parent.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
        psutil.Process(before).kill()
        await until(lambda: up.process.events().count("a worker ended") == 2)
        assert {(await up.chat()).status_code for _ in range(8)} == {200}
        parent.rlimit(psutil.RLIMIT_NOFILE, limits)
        await until(lambda: up.pids()[2] != before)
        told = [line["why"] for line in up.process.lines if line["event"] == "a worker ended"]
        assert told[:2] == ["SIGKILL", "Too many open files"]
        up.process.assert_no_traceback()


async def test_a_worker_that_can_not_be_started_leaves_its_connections_to_the_other_and_without_one_all_ends(
    engine: FakeEngine, tmp_path: Path
) -> None:
    keys = keys_file(tmp_path / "keys.json", one={})
    async with pair(engine, tmp_path, auth__disabled="false", auth__keys_file=keys) as up:
        keys.write_text("broken")  # those that run keep their keys; one that starts has none
        psutil.Process(up.pids()[1]).kill()
        await until(lambda: up.process.events().count("a worker ended") == 2)
        answers = [await up.chat(headers=with_key("one")) for _ in range(12)]
        assert {answer.status_code for answer in answers} == {200}
        psutil.Process(up.pids()[2]).kill()
        assert await up.process.ended(30) == 1
        assert "no worker can be started, the gateway ends" in up.process.events()
        assert {line.split(" = ")[0] for line in up.process.unparsed} == {"gateway: auth.keys_file"}
