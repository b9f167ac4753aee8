"""A disk without room stops no worker, and refuses only what it has no room for."""

from pathlib import Path

import psutil
import pytest

from gateway.accountbook import ROOM_RECORDS, SharedBook
from gateway.workers import Worker
from tests.fakes.engine import FakeEngine
from tests.wire.conftest import until
from tests.wire.guarding import keys_file, with_key
from tests.wire.workers import directories, pair


async def test_a_key_for_whose_account_there_is_no_room_is_refused_with_503_until_there_is_and_nobody_else(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    keys = keys_file(tmp_path / "keys.json", old={"concurrent": 9}, new={"concurrent": 9}, free={})
    async with pair(engine, tmp_path, auth__disabled="false", auth__keys_file=keys) as up:
        assert (await up.chat(headers=with_key("old"))).status_code == 200
        (shared,) = directories(tmp_path)
        book = SharedBook(shared / "accounts", Worker(1, 2))
        for number in range(ROOM_RECORDS - 1):
            with book.account(f"key-{number}"):
                pass
        book.close()
        workers = [psutil.Process(pid) for pid in up.pids().values()]
        usual = workers[0].rlimit(psutil.RLIMIT_FSIZE)
        for worker in workers:
            worker.rlimit(psutil.RLIMIT_FSIZE, (1, usual[1]))  # no file grows: what a full disk is to a process
        for _ in range(6):
            refused = await up.chat(headers=with_key("new"))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert refused.json()["error"]["code"] == "gateway_disk_full"
            assert (await up.chat(headers=with_key("old"))).status_code == 200
            assert (await up.chat(headers=with_key("free"))).status_code == 200
        for worker in workers:
            worker.rlimit(psutil.RLIMIT_FSIZE, usual)

        def told(beginning: str) -> list[str]:
            return [line["worker"] for line in up.process.lines if line["event"].startswith(beginning)]

        async def again() -> bool:  # by connections of their own, for which the workers take turns as they like
            answer = await up.chat(headers={**with_key("new"), "Connection": "close"})
            assert answer.status_code == 200
            return set(told("there is room for the accounts")) == set(told("no room for the accounts"))

        await until(again)
        assert len(told("no room for the accounts")) == len(set(told("no room for the accounts"))) > 0, "once a worker"
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
