"""The gateway's benchmark itself: a very short run, and that it does not take a wrong answer for a right one."""

import sys
from collections.abc import AsyncIterator

import pytest

from scripts.bench_gateway.load import Address, Load, LoadError
from scripts.bench_gateway.measure import measure
from scripts.bench_gateway.starting import Plan
from tests.fakes.engine import FakeEngine, Script

PLAN = Plan(
    rounds=1,
    seconds=0.2,
    rate=100,
    in_flight=(16,),
    streams=4,
    step_ms=5,
    per_write=(1, 4),
    flood=(1000, 8),
    held=20,
    python=sys.executable,
    peer_python="",
    peers={},
)


async def test_a_short_run_checks_every_answer_and_counts_them_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.Process.cpu_affinity", lambda *_: [])  # this process goes on to other tests
    told: list[str] = []
    result = await measure(PLAN, told.append)
    (rows,) = result["rounds"]
    assert list(rows) == ["direct", "gateway", "gateway, window 0"]
    kinds = ["one_in_flight", "open_loop", "in_flight_16", "events_1", "events_4", "flood", "held"]
    assert all(list(row) == kinds for row in rows.values())
    for name, row in rows.items():
        assert row["open_loop"]["prompts"] == 40, name
        assert row["in_flight_16"]["prompts"] >= 16, name
        assert row["events_1"]["events"] == 4 * 40, name
        assert row["events_4"]["events"] == 4 * 40 * 4, name
        assert row["flood"]["events"] == 4 * 1000, name
        assert row["held"]["streams"] == 20, name
    merged, single = rows["gateway"]["in_flight_16"], rows["gateway, window 0"]["in_flight_16"]
    assert merged["calls"] < merged["prompts"]  # the window merges, and nothing else does
    assert single["calls"] == single["prompts"]
    assert rows["gateway"]["held"]["memory_mb"] > 20
    assert "party" not in rows["direct"]["held"]["cpu_s"]
    assert told == [f"round 1/1 took {told[0].split()[-2]} s"]


@pytest.fixture
async def stranger() -> AsyncIterator[FakeEngine]:
    """An engine that answers well, but with other words than the benchmark's source."""
    async with FakeEngine(models=("bench-8b", "bench-8b-chat")) as engine:
        yield engine


async def test_another_answer_than_the_sources_voids_the_figures(stranger: FakeEngine) -> None:
    async with Load(Address(stranger.port)) as load:
        with pytest.raises(LoadError, match="another answer"):
            await load.closed_loop(1, 0.1)
    async with Load(Address(stranger.port)) as load:
        with pytest.raises(LoadError, match="other words"):
            await load.streams(1, 5, 1, 1)


async def test_an_error_or_a_connection_cut_off_voids_the_figures(stranger: FakeEngine) -> None:
    stranger.script("/v1/completions", Script(status=500, body=b"out of luck"), Script(reset_before_answer=True))
    for why in ("it answered 500", "closed before an answer was complete"):
        async with Load(Address(stranger.port)) as load:
            with pytest.raises(LoadError, match=why):
                await load.open_loop(10, 0.1)
