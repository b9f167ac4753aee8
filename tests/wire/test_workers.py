"""A gateway of two workers, as users run it: one page of metrics, one set of limits, one drain, and nothing left."""

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.metrics import Metrics
from scripts import usage
from tests.fakes.engine import FakeEngine, Script
from tests.wire.conftest import _sum, until
from tests.wire.guarding import keys_file, with_key
from tests.wire.process import started
from tests.wire.workers import ADMIN, HURRIED, Stream, directories, logged, pair


async def test_every_worker_tells_the_whole_gateways_counts_exactly(engine: FakeEngine, tmp_path: Path) -> None:
    async with pair(engine, tmp_path, program=HURRIED) as up:
        answers = [answer for _ in range(8) for answer in await asyncio.gather(*(up.chat() for _ in range(25)))]
        assert {answer.status_code for answer in answers} == {200}
        await until(lambda: logged(up, 200))
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
        return [line for line in page.splitlines() if line.startswith(("# HELP", "# TYPE")) and "_created" not in line]

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


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"workers": 0}, "workers = '0': expected at least 1"),
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


async def test_a_status_that_says_ready_never_says_in_the_same_breath_that_an_engine_is_absent(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with pair(engine, tmp_path) as up:
        for _ in range(3):
            for healthy in (False, True):
                engine.healthy = healthy

                async def told() -> bool:
                    status = await up.status()
                    kinds = [finding["kind"] for finding in status["advice"]["findings"]]
                    if status["ready"] is healthy:  # noqa: B023
                        assert ("engine_absent" in kinds) is not healthy  # noqa: B023
                    return bool(status["ready"] is healthy)  # noqa: B023

                await until(told)


async def test_a_status_has_a_row_for_a_worker_that_is_not_there(engine: FakeEngine, tmp_path: Path) -> None:
    async with pair(engine, tmp_path) as up:
        victim = up.pids()[1]
        psutil.Process(victim).kill()
        rows = (await up.status())["workers"]
        assert [row["worker"] for row in rows] == [1, 2]
        assert [row["worker"] for row in rows if not row["ready"]] == [1]
        await until(lambda: up.pids()[1] != victim)


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
