"""The ledger by itself: sums, days, and disks that fail."""

import asyncio
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.exchange import Exchange
from gateway.keys import Tenant
from gateway.ledger import MAX_ROWS, Ledger
from gateway.metrics import Metrics
from gateway.settings import SettingsError
from scripts import usage

TODAY = "2030-01-31"


def exchange(name: str = "app1", status: int = 200, **fields: object) -> Exchange:
    made = Exchange("id", "id", 0.0, "/v1/completions", Tenant(name))
    made.status = status
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def read(path: Path) -> list[usage.Row]:
    return usage.rows(path, None, None, None)


def remove_all(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


async def test_requests_refusals_failures_and_tokens_are_summed_by_day_tenant_and_model(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    days = iter([TODAY, TODAY, TODAY, TODAY, TODAY, "2030-02-01"])
    async with Ledger(path, Metrics(), lambda: next(days)) as ledger:
        ledger.record(exchange(prompt_tokens=10, generation_tokens=5), "m")
        ledger.record(exchange(status=429, refused=True), "m")
        ledger.record(exchange(status=503, refused=True), "m")
        ledger.record(exchange(failure="broken_stream", prompt_tokens=7), "m")
        ledger.record(exchange("app2", status=502), "m")
        ledger.record(exchange(prompt_tokens=1), "m")
    assert read(path) == [
        (TODAY, "app1", "m", 4, 2, 1, 17, 5),
        (TODAY, "app2", "m", 1, 0, 1, 0, 0),
        ("2030-02-01", "app1", "m", 1, 0, 0, 1, 0),
    ]


async def test_a_clients_mistake_is_a_request_and_nothing_else(tmp_path: Path) -> None:
    async with Ledger(tmp_path / "u", Metrics(), lambda: TODAY) as ledger:
        ledger.record(exchange(status=400), "")
        ledger.record(exchange(status=499), "")
    assert read(tmp_path / "u") == [(TODAY, "app1", "", 2, 0, 0, 0, 0)]


async def test_what_has_no_tenant_or_is_no_inference_is_not_counted(tmp_path: Path) -> None:
    async with Ledger(tmp_path / "u", Metrics(), lambda: TODAY) as ledger:
        ledger.record(exchange(tenant=None, status=401), "")
        ledger.record(exchange(route="/v1/models"), "")
    assert read(tmp_path / "u") == []


async def test_sums_go_on_after_a_restart_and_two_gateways_may_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "u"
    async with Ledger(path, Metrics(), lambda: TODAY) as one, Ledger(path, Metrics(), lambda: TODAY) as two:
        for _ in range(10):
            one.record(exchange(prompt_tokens=1), "m")
            two.record(exchange(prompt_tokens=1), "m")
    async with Ledger(path, Metrics(), lambda: TODAY) as again:
        again.record(exchange(prompt_tokens=1), "m")
    assert read(path) == [(TODAY, "app1", "m", 21, 0, 0, 21, 0)]


async def test_usage_is_on_disk_well_within_a_second_while_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "u"
    async with Ledger(path, Metrics(), lambda: TODAY) as ledger:
        ledger.record(exchange(prompt_tokens=1), "m")
        async with asyncio.timeout(1):
            while not read(path):
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("limit", ["max_page_count = 2", "query_only = 1"], ids=["full", "read-only"])
async def test_a_disk_that_takes_nothing_fails_no_request_and_loses_nothing_once_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: str
) -> None:
    """Limits of SQLite's own give the same errors, in the same place, as a full or a read-only disk."""
    path, metrics = tmp_path / "u", Metrics()
    async with Ledger(path, metrics, lambda: TODAY) as ledger:
        assert ledger._connection is not None
        ledger._connection.execute(f"PRAGMA {limit}")
        for number in range(500):
            ledger.record(exchange(f"app{number}", prompt_tokens=3), "m" * 100)
        await until(lambda: metrics.registry.get_sample_value("gateway_ledger_failures_total"))
        assert metrics.registry.get_sample_value("gateway_ledger_pending_rows") == 500
        ledger.record(exchange("app0", prompt_tokens=3), "m" * 100)
        # It opens the file anew after a failure, which forgets the limit: the disk takes writes again.
        await until(lambda: metrics.registry.get_sample_value("gateway_ledger_pending_rows") == 0)
    rows = read(path)
    assert len(rows) == 500
    assert sum(int(row[6]) for row in rows) == 3 * 501
    assert [record.message for record in caplog.records] == [
        "the ledger can't be written, usage is kept in memory",
        "the ledger can be written again",
    ]


async def test_a_file_that_another_process_holds_is_waited_for_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.ledger.BUSY_S", 0.05)
    path, metrics = tmp_path / "u", Metrics()
    async with Ledger(path, metrics, lambda: TODAY) as ledger:
        holder = sqlite3.connect(path)
        holder.execute("BEGIN IMMEDIATE")
        ledger.record(exchange(prompt_tokens=1), "m")
        await until(lambda: metrics.registry.get_sample_value("gateway_ledger_failures_total"))
        ledger.record(exchange(prompt_tokens=1), "m")
        holder.rollback()
        holder.close()
    assert read(path) == [(TODAY, "app1", "m", 2, 0, 0, 2, 0)]


async def test_a_file_that_is_taken_away_is_made_again_and_counting_goes_on(tmp_path: Path) -> None:
    path, metrics = tmp_path / "u", Metrics()
    async with Ledger(path, metrics, lambda: TODAY) as ledger:
        ledger.record(exchange(prompt_tokens=1), "m")
        await until(lambda: read(path))
        remove_all(tmp_path)
        ledger.record(exchange(prompt_tokens=5), "m")
    assert read(path) == [(TODAY, "app1", "m", 1, 0, 0, 5, 0)]


async def test_usage_that_can_not_be_written_to_the_end_is_told_and_the_end_is_not_held_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "place" / "u"
    path.parent.mkdir()
    async with Ledger(path, Metrics(), lambda: TODAY) as ledger:
        path.parent.rename(tmp_path / "elsewhere")
        ledger.record(exchange(prompt_tokens=1), "m")
    assert caplog.records[-1].message == "usage is lost, the ledger could not be written to the end"


async def test_memory_is_bounded_however_long_the_disk_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ledger.MAX_ROWS", 10)
    metrics = Metrics()
    ledger = Ledger(tmp_path / "u", metrics, lambda: TODAY)
    for number in range(50):
        ledger.record(exchange(f"app{number}"), "m")
    assert metrics.registry.get_sample_value("gateway_ledger_pending_rows") == 10
    assert MAX_ROWS == 100_000


@pytest.mark.parametrize("kind", ["no directory", "a directory", "another file", "another table"])
async def test_a_path_that_can_be_no_ledger_stops_the_start_with_key_value_and_expectation(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "u"
    match kind:
        case "no directory":
            path = tmp_path / "missing" / "u"
        case "a directory":
            path.mkdir()
        case "another file":
            path.write_bytes(b"no database at all, but a long enough text" * 100)
        case "another table":
            connection = sqlite3.connect(path)
            connection.execute("CREATE TABLE usage (something TEXT)")
            connection.close()
    with pytest.raises(SettingsError, match=r"^ledger\.path = '.*/u': .*; expected a SQLite file"):
        Ledger(path, Metrics())


async def test_a_row_that_can_not_be_written_is_counted_told_once_and_blocks_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, metrics = tmp_path / "u", Metrics()
    async with Ledger(path, metrics, lambda: TODAY) as ledger:
        ledger.record(exchange(prompt_tokens=2), "before")
        ledger.record(exchange(prompt_tokens=2**63), "absurd")
        ledger.record(exchange(prompt_tokens=2), "\ud800")
        ledger.record(exchange(prompt_tokens=2), "between")
        await until(lambda: len(read(path)) == 2)
        ledger.record(exchange(prompt_tokens=2), "before")
    assert [(row[2], row[6]) for row in read(path)] == [("before", 4), ("between", 2)]
    assert metrics.registry.get_sample_value("gateway_ledger_failures_total") == 2
    assert [record.message for record in caplog.records] == ["usage is lost, the ledger can't take these rows"]


async def test_whatever_a_commit_raises_the_ledger_goes_on_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, metrics = tmp_path / "u", Metrics()
    async with Ledger(path, metrics, lambda: TODAY) as ledger:
        with monkeypatch.context() as patched:
            patched.setattr("gateway.ledger._ADD", None)  # a TypeError, which no SQLite raises by itself
            ledger.record(exchange(prompt_tokens=2), "m")
            await until(lambda: (metrics.registry.get_sample_value("gateway_ledger_failures_total") or 0) >= 2)
        await until(lambda: read(path))
    assert read(path) == [(TODAY, "app1", "m", 1, 0, 0, 2, 0)]
    assert [record.message for record in caplog.records] == [
        "the ledger can't be written, usage is kept in memory",
        "the ledger can be written again",
    ]


# -- the export --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def ledger_file(tmp_path: Path) -> Path:
    path = tmp_path / "usage.sqlite"
    days = iter(["2030-01-01", "2030-01-02", "2030-01-02", "2030-01-03"])
    async with Ledger(path, Metrics(), lambda: next(days)) as ledger:
        for name in ("app1", "app2", 'a"p,p', "app1"):
            ledger.record(exchange(name, prompt_tokens=2, generation_tokens=1), "m")
    return path


def exported(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert usage.main(["--ledger", str(path), *words]) == 0
    return capsys.readouterr().out


def test_the_csv_has_a_header_and_one_row_a_day_tenant_and_model(
    ledger_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported(ledger_file, capsys).splitlines() == [
        "day,tenant,model,requests,refusals,failures,prompt_tokens,generation_tokens",
        "2030-01-01,app1,m,1,0,0,2,1",
        '2030-01-02,"a""p,p",m,1,0,0,2,1',
        "2030-01-02,app2,m,1,0,0,2,1",
        "2030-01-03,app1,m,1,0,0,2,1",
    ]


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (("--since", "2030-01-02"), 3),
        (("--until", "2030-01-02"), 3),
        (("--since", "2030-01-02", "--until", "2030-01-02"), 2),
        (("--tenant", "app1"), 2),
        (("--tenant", "app1' OR '1'='1"), 0),
        (("--since", "2031-01-01"), 0),
    ],
)
def test_days_and_tenant_narrow_it_down(
    ledger_file: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], rows: int
) -> None:
    assert len(exported(ledger_file, capsys, *words).splitlines()) == 1 + rows


def test_a_ledger_that_is_none_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no database at all, but a long enough text" * 100)
    for name in ("missing", "text", "."):
        assert usage.main(["--ledger", str(tmp_path / name)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("usage: ")
        assert err.count("\n") == 1
    assert not (tmp_path / "missing").exists()


DOCKER = """\
#!{python}
import os, sys
words = sys.argv[1:]
if "config" in words:
    print('{{"volumes": {{"gateway-data": {{"name": "stack_data"}}}}, "services": {{"gateway": '
          '{{"user": "1:1", "volumes": [{{"source": "gateway-data"}}]}}}}}}')
elif words[0] == "volume":
    print({volumes!r})
else:
    program = words[words.index("-c") :]
    os.execv({python!r}, [{python!r}, *program[:-1], {folder!r}])
"""


def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, volumes: str = "stack_data") -> None:
    """A docker whose container is a process of this machine: what runs in it, and on what, is real."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "docker").write_text(DOCKER.format(python=sys.executable, folder=str(folder), volumes=volumes))
    (tools / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.delenv(usage.PATH_VARIABLE, raising=False)
    (tmp_path / ".env").touch()
    monkeypatch.setattr(usage, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)


def test_the_stacks_own_ledger_is_read_where_none_lies_here(
    ledger_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = exported(ledger_file, capsys)
    (ledger_file.parent / "volume").mkdir()
    inside = ledger_file.rename(ledger_file.parent / "volume" / usage.FILE)
    before = inside.read_bytes()
    docker(tmp_path, monkeypatch, inside.parent)
    assert usage.main([]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (expected, "usage: of the stack in containers (volume stack_data)\n")
    assert [path.name for path in inside.parent.iterdir()] == [usage.FILE] and inside.read_bytes() == before


@pytest.mark.parametrize(
    ("volumes", "folder", "says"),
    [
        ("other", "empty", "neither data/usage.sqlite nor a ledger of the stack"),
        ("stack_data", "empty", "holds no ledger yet"),
        ("stack_data", "gone", "volume stack_data: FileNotFoundError"),
    ],
)
def test_a_stack_without_a_ledger_is_one_line(
    volumes: str,
    folder: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    docker(tmp_path, monkeypatch, tmp_path / folder, volumes)
    assert usage.main([]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


def test_days_the_wrong_way_round_are_wrong_usage(ledger_file: Path) -> None:
    with pytest.raises(SystemExit) as left:
        usage.main(["--since", "2030-01-02", "--until", "2030-01-01"])
    assert left.value.code == 2


def test_the_exporting_process_leaves_no_file_of_its_own(ledger_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(ledger_file.parent.iterdir())
    exported(ledger_file, capsys)
    assert set(ledger_file.parent.iterdir()) == before
