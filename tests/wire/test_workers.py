"""A gateway of two workers, as users run it: one page of metrics, one set of limits, one drain, and nothing left."""

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gateway.metrics import Metrics
from scripts import usage
from tests.fakes.engine import MODEL, FakeEngine, Script, events_of
from tests.wire.conftest import _NO_TLS, _sum, until
from tests.wire.process import GatewayProcess, started
from tests.wire.test_security import keys_file, with_key

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


def _logged(up: Pair, count: int) -> bool:
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


async def test_every_worker_tells_the_whole_gateways_counts_exactly(engine: FakeEngine, tmp_path: Path) -> None:
    async with pair(engine, tmp_path, program=HURRIED) as up:
        answers = [answer for _ in range(8) for answer in await asyncio.gather(*(up.chat() for _ in range(25)))]
        assert {answer.status_code for answer in answers} == {200}
        await until(lambda: _logged(up, 200))
        assert min(up.answered_by()[number] for number in (1, 2)) > 50
        tokens = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
        pages = {number: await up.page_of(number) for number in (1, 2)}
        for page in pages.values():
            assert _sum(page, "gateway_requests_total", {"route": "/v1/chat/completions", "status": "200"}) == 200
            assert _sum(page, "gateway_request_seconds_count", {"route": "/v1/chat/completions"}) == 200
            assert _sum(page, "gateway_request_seconds_bucket", {"le": "+Inf"}) == 200
            assert _sum(page, "gateway_tokens_total", {"kind": "generation"}) == tokens
            assert _sum(page, "gateway_in_flight_requests", {}) == 0
            assert _sum(page, "gateway_upstream_calls", {}) == 0
            assert _sum(page, "gateway_replica_ready", {}) == 1
        up.process.assert_no_traceback()


async def test_the_page_has_every_family_of_a_gateway_of_one_process_and_none_of_a_process(
    engine: FakeEngine, tmp_path: Path
) -> None:
    def families(page: str) -> list[str]:
        """Names, texts and types in their order, `_created` left to the next line."""
        return [line for line in page.splitlines() if line.startswith("# ") and "_created" not in line]

    async with pair(engine, tmp_path, program=HURRIED) as up:
        assert (await up.chat()).status_code == 200
        pages = [await up.page_of(number) for number in (1, 2)]
    alone = families(Metrics().page().decode())
    for page in pages:
        assert families(page) == alone
        assert "process_" not in page
        assert "pid=" not in page
    began = {
        line for page in pages for line in page.splitlines() if line.startswith("gateway_upstream_retries_created")
    }
    assert len(began) == 1, "a worker's own start would look like a restart of the gateway"


async def test_gauges_are_of_both_workers_and_fall_back_to_nothing(engine: FakeEngine, tmp_path: Path) -> None:
    hold = asyncio.Event()
    engine.default = Script(
        pieces=[b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n', hold, b"data: [DONE]\n\n"]
    )
    async with pair(engine, tmp_path) as up:
        streams = [Stream(up) for _ in range(12)]
        await asyncio.gather(*(stream.began.wait() for stream in streams))
        for _ in range(6):
            assert await up.metric("gateway_in_flight_requests") == 12
            assert await up.metric("gateway_upstream_calls") == 12
        status = await up.status()
        assert [row["in_flight"] > 0 for row in status["workers"]] == [True, True]
        assert status["replicas"][0]["calls"] == status["admission"]["in_flight"] == 12
        assert status["worker"] in ("1 of 2", "2 of 2")
        hold.set()
        await asyncio.gather(*(stream.task for stream in streams))

        async def idle() -> bool:
            return await up.metric("gateway_in_flight_requests") == await up.metric("gateway_upstream_calls") == 0

        await until(idle)
        assert await up.metric("gateway_in_flight_tokens") == 0


async def test_a_restarted_workers_counts_go_on_and_its_gauges_do_not(engine: FakeEngine, tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with pair(engine, tmp_path) as up:
        assert {(await up.chat()).status_code for _ in range(30)} == {200}
        await until(lambda: _logged(up, 30))
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


async def test_a_worker_killed_under_load_costs_only_what_it_had_in_flight_and_is_back_within_2_s(
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
        assert back_s < 2, back_s
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


async def test_nothing_that_workers_map_has_a_hole_so_a_full_disk_can_not_kill_them(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    limits = {"few": {"concurrent": 3}}
    auth = {"auth__disabled": "false", "auth__keys_file": keys_file(tmp_path / "keys.json", **limits)}
    async with pair(engine, tmp_path, **auth) as up:
        (shared,) = directories(tmp_path)
        before = {path: path.stat().st_ino for path in shared.rglob("*") if path.is_file()}
        assert {(await up.chat(headers=with_key("few"))).status_code for _ in range(8)} == {200}
        await up.kill(2)
        assert await up.metric("gateway_in_flight_requests") == 0
        after = {path: path.stat() for path in shared.rglob("*") if path.is_file()}
        assert {path: stat.st_ino for path, stat in after.items()} == before, "made anew, which wants room"
        assert not [path for path, stat in after.items() if stat.st_blocks * 512 < stat.st_size]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"workers": 0}, "workers = '0': Input should be greater than or equal to 1"),
        (
            {"auth__disabled": "false", "auth__keys_file": "/nowhere/keys.json"},
            "auth.keys_file = '/nowhere/keys.json': ",
        ),
        ({"ledger__path": "/nowhere/usage.sqlite"}, "ledger.path = '/nowhere/usage.sqlite': "),
        ({"admission__max_in_flight": 1}, "admission.max_in_flight = 1: expected at least workers"),
        (
            {"workers": 40},
            "limits.max_arriving_bytes = 268435456: expected at least 40 workers x limits.max_body_bytes",
        ),
    ],
)
async def test_a_mistake_is_told_once_and_ends_the_start(
    settings: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with started(["http://127.0.0.1:1"], **{"workers": 2, **settings}) as process:
        assert await process.ended() == 1
        (line,) = process.unparsed
        assert line.startswith(f"gateway: {expected}"), line
    assert not directories(tmp_path)


async def test_a_second_gateway_can_not_join_in_on_the_port(engine: FakeEngine, tmp_path: Path) -> None:
    async with pair(engine, tmp_path) as up:
        address = up.process.url.removeprefix("http://")
        for workers in (1, 2):
            async with started([engine.url], workers=workers, listen=address) as second:
                assert await second.ended() == 1
                assert second.unparsed[0].startswith(f"gateway: listen = '{address}': Address already in use")


async def test_a_keys_limits_hold_for_both_workers_together(engine: FakeEngine, tmp_path: Path) -> None:
    hold = asyncio.Event()
    limits = {"few": {"concurrent": 3}, "slow": {"requests_per_minute": 5}}
    auth = {"auth__disabled": "false", "auth__keys_file": keys_file(tmp_path / "keys.json", **limits)}
    async with pair(engine, tmp_path, **auth) as up:
        statuses = [(await up.chat(headers=with_key("slow"))).status_code for _ in range(16)]
        assert sorted(statuses) == [200] * 5 + [429] * 11
        engine.default = Script(
            pieces=[b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n', hold, b"data: [DONE]\n\n"]
        )
        streams = [Stream(up, with_key("few")) for _ in range(14)]
        await asyncio.gather(*(stream.began.wait() for stream in streams))
        assert sorted(stream.status for stream in streams) == [200] * 3 + [429] * 11
        # A worker that dies takes what it had in flight off the key's account.
        rows = {row["worker"]: row["in_flight"] for row in (await up.status())["workers"]}
        victim = max(rows, key=lambda number: rows[number])
        await up.kill(victim)
        again = [Stream(up, with_key("few")) for _ in range(14)]
        await asyncio.gather(*(stream.began.wait() for stream in again))
        assert Counter(stream.status for stream in again) == {200: rows[victim], 429: 14 - rows[victim]}
        hold.set()
        await asyncio.gather(*(stream.task for stream in (*streams, *again)), return_exceptions=True)
        assert (await up.chat(headers=with_key("few"))).status_code == 200


async def test_what_admission_may_hold_is_divided_without_loss(engine: FakeEngine, tmp_path: Path) -> None:
    hold = asyncio.Event()
    engine.default = Script(
        pieces=[b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n', hold, b"data: [DONE]\n\n"]
    )
    settings = {"admission__capacity_tokens": 100_001, "admission__max_in_flight": 5, "admission__max_queue_tokens": 0}
    async with pair(engine, tmp_path, **settings) as up:
        assert await up.metric("gateway_capacity_tokens") == 100_001
        assert [row["capacity_tokens"] for row in (await up.status())["workers"]] == [50_001, 50_000]
        streams = [Stream(up) for _ in range(40)]
        await asyncio.gather(*(stream.began.wait() for stream in streams))
        assert sorted(stream.status for stream in streams) == [200] * 5 + [429] * 35
        assert await up.metric("gateway_setting", name="max_in_flight") == 5
        hold.set()
        await asyncio.gather(*(stream.task for stream in streams))


async def test_a_drain_order_holds_for_every_worker_and_for_those_that_come_later(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with pair(engine, tmp_path, timeouts__reload_wait_s="0.05") as up:
        order = {"replica": engine.url, "on": True}
        answer = await up.ask("POST", "/drain", admin=True, headers=ADMIN, json=order)
        assert answer.json()["replicas"][0]["state"] == "draining"
        assert [row["ready"] for row in answer.json()["workers"]] == [False, False]
        assert {(await up.chat()).status_code for _ in range(8)} == {503}
        await up.kill(1)
        asked = len(engine.asked("/v1/chat/completions"))
        assert {(await up.chat()).status_code for _ in range(8)} == {503}
        assert len(engine.asked("/v1/chat/completions")) == asked
        await up.ask("POST", "/drain", admin=True, headers=ADMIN, json={**order, "on": False})
        assert {(await up.chat()).status_code for _ in range(8)} == {200}


async def test_the_ledger_has_the_requests_of_both_workers(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    async with pair(engine, tmp_path, ledger__path=path) as up:
        answers = [answer for _ in range(10) for answer in await asyncio.gather(*(up.chat() for _ in range(12)))]
        assert min(up.answered_by()[number] for number in (1, 2)) > 20
        up.process.signal(signal.SIGTERM)
        assert await up.process.ended() == 0
        up.process.assert_no_traceback()
    (row,) = usage.rows(path, None, None, None)
    assert row[3] == 120
    assert row[7] == sum(answer.json()["usage"]["completion_tokens"] for answer in answers)


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
