"""Engines that come and go while the gateway runs: by file, and by the addresses behind a name."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from gateway.monitor import Monitor
from gateway.replicas import State
from tests.fakes.engine import MODEL, FakeEngine, Script
from tests.wire.conftest import Running, serve, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LOOK_S = 0.05


def write(path: Path, *engines: FakeEngine | str) -> None:
    """The way the documentation says: whole, then renamed."""
    targets = [engine if isinstance(engine, str) else f"{engine.host}:{engine.port}" for engine in engines]
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps([{"targets": targets, "labels": {"model": "whatever", "__metrics_path__": "/m"}}]))
    draft.rename(path)


@contextlib.asynccontextmanager
async def following(path: Path, *static: str, wait: bool = True) -> AsyncIterator[Running]:
    async with serve(list(static), wait, discovery={"files": [path], "interval_s": LOOK_S}) as up:
        yield up
        await up.settled()


def urls(up: Running) -> list[str]:
    return [replica.url for replica in up.gateway.replicas.all]


def ready(up: Running) -> set[str]:
    return {replica.url for replica in up.gateway.replicas.ready()}


async def test_a_new_engine_joins_and_takes_requests_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    async with FakeEngine() as one, FakeEngine() as other:
        write(file, one)
        async with following(file) as up:
            assert urls(up) == [one.url]
            write(file, one, other)
            await until(lambda: ready(up) == {one.url, other.url})
            for number in range(30):
                assert (await up.completion(f"p{number}")).status_code == 200
            assert len(other.asked(COMPLETIONS)) > 3
            assert await up.metric("gateway_replica_ready", replica=other.url) == 1


async def test_one_that_is_named_no_more_gets_nothing_new_ends_its_stream_and_is_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    async with FakeEngine() as one, FakeEngine() as other:
        write(file, one, other)
        async with following(file) as up:
            await until(lambda: len(ready(up)) == 2)
            one.gate = other.gate = asyncio.Event()
            streams = []
            while not one.asked(CHAT):
                streams.append(asyncio.create_task(read(up, f"s{len(streams)}")))
                await asyncio.sleep(0.02)
            write(file, other)
            leaving = next(replica for replica in up.gateway.replicas.all if replica.url == one.url)
            await until(lambda: leaving.state is State.DRAINING)
            before = len(one.seen)
            for number in range(20):
                assert (await up.completion(f"p{number}")).status_code == 200
            assert len(one.asked(COMPLETIONS)) == 0
            assert len(one.seen) == before
            assert one.url in urls(up), "its streams have not ended"
            assert await up.metric("gateway_replicas") == 1, "listed is what a source names"
            one.gate.set()
            assert all(b"[DONE]" in body for body in await asyncio.gather(*streams))
            await until(lambda: urls(up) == [other.url])
            page = await up.metrics_page()
            assert one.url not in page
            assert other.url in page
            assert one.url not in str(up.gateway.health.status())


async def read(up: Running, text: str) -> bytes:
    async with up.stream(text) as answer:
        assert answer.status_code == 200
        return bytes(await answer.aread())


async def test_one_that_is_named_again_while_it_drains_stays(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    async with FakeEngine() as one:
        write(file, one)
        async with following(file) as up:
            one.gate = asyncio.Event()
            stream = asyncio.create_task(read(up, "s"))
            await until(lambda: one.asked(CHAT))
            replica = up.gateway.replicas.all[0]
            write(file)
            await until(lambda: replica.state is State.DRAINING)
            write(file, one)
            await until(lambda: replica.state is State.READY)
            one.gate.set()
            assert b"[DONE]" in await stream
            assert (await up.completion("p")).status_code == 200
            assert up.gateway.replicas.all == [replica]


async def test_one_that_is_named_again_in_the_moment_in_which_it_would_be_forgotten_stays(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, ends = Monitor.run, []

    async def run(monitor: Monitor) -> None:
        await usual(monitor)
        if not ends:
            ends.append(1)
            up.gateway.replicas.list_urls([engine.url])

    monkeypatch.setattr(Monitor, "run", run)
    async with serve([engine.url]) as up:
        up.gateway.replicas.list_urls([])
        await until(lambda: ends)
        engine.healthy = False
        await until(lambda: up.gateway.replicas.all[0].state is State.DOWN)
        engine.healthy = True
        await until(lambda: ready(up) == {engine.url})
        assert (await up.completion("p")).status_code == 200


async def test_one_that_is_down_is_forgotten_at_once(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    async with FakeEngine() as one, FakeEngine() as gone:
        write(file, one, gone)
        await gone.stop()
        async with following(file) as up:
            write(file, one)
            await until(lambda: urls(up) == [one.url])


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ('[{"targets": ["127.0.0.1:1"]', "line 1: expected JSON"),
        ('[{"targets": ["127.0.0.1"]}]', "[0].targets[0]: expected host:port"),
        (None, "No such file"),
    ],
    ids=["syntax", "field", "missing"],
)
async def test_a_bad_file_keeps_the_engines_is_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: str | None, told: str
) -> None:
    file = tmp_path / "engines.json"
    async with FakeEngine() as one, FakeEngine() as other:
        write(file, one)
        async with following(file) as up:
            if bad is None:
                file.unlink()
            else:
                file.write_text(bad)
            await until(lambda: up.gateway.discovery.sources[0].problem)
            await asyncio.sleep(5 * LOOK_S)
            assert await up.metric("gateway_discovery_failures_total", kind="file") == 1
            assert await up.metric("gateway_discovery_sources_bad") == 1
            lines = [record.__dict__["fields"] for record in caplog.records if "looked up, the old" in record.message]
            assert len(lines) == 1
            assert told in lines[0]["why"]
            (source,) = up.gateway.health.status()["discovery"]
            assert told in source["problem"]
            assert (await up.completion("p")).status_code == 200
            write(file, other)
            await until(lambda: ready(up) == {other.url})
            assert await up.metric("gateway_discovery_sources_bad") == 0


async def test_a_file_touched_with_the_same_content_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    async with FakeEngine() as one:
        write(file, one)
        async with following(file) as up:
            replica = up.gateway.replicas.all[0]
            os.utime(file, (1, 1))
            write(file, one)
            await asyncio.sleep(5 * LOOK_S)
            assert up.gateway.replicas.all == [replica]
            assert replica.state is State.READY


async def test_the_gateway_starts_without_the_file_and_serves_when_it_comes(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    async with FakeEngine() as one, following(file, wait=False) as up:
        refused = await up.completion("p")
        assert refused.status_code == 503
        assert "no engine is listed" in refused.json()["error"]["message"]
        write(file, one)
        await until(lambda: ready(up) == {one.url})
        assert (await up.completion("p")).status_code == 200


async def test_engines_of_the_settings_and_of_files_are_all_there_once_each(tmp_path: Path) -> None:
    file = tmp_path / "engines.yml"
    async with FakeEngine() as one, FakeEngine() as other:
        file.write_text(f"- targets: [{one.host}:{one.port}, {other.host}:{other.port}]\n")
        async with following(file, one.url) as up:
            assert urls(up) == [one.url, other.url]
            write(file)  # YAML reads JSON too
            await until(lambda: urls(up) == [one.url])


async def test_a_model_that_left_with_its_engine_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    async with FakeEngine() as one, FakeEngine(models=("other",)) as other:
        write(file, one, other)
        async with following(file) as up:
            await until(lambda: len(ready(up)) == 2)
            assert (await up.completion("p", model="other")).status_code == 200
            write(file, one)
            await until(lambda: urls(up) == [one.url])
            assert (await up.completion("p", model="other")).status_code == 404
            assert (await up.completion("p", model=MODEL)).status_code == 200


async def test_a_request_under_way_is_not_cut_when_its_engine_is_named_no_more(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    async with FakeEngine() as one:
        write(file, one)
        async with following(file) as up:
            one.script(COMPLETIONS, Script(delay_s=0.5))
            slow = asyncio.create_task(up.completion("slow"))
            await until(lambda: one.asked(COMPLETIONS))
            write(file)
            assert (await slow).status_code == 200
            await until(lambda: urls(up) == [])


class Names:
    """What the resolver says; an OSError is raised."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: list[str] | OSError = list(addresses)
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses


async def test_each_address_behind_a_name_is_a_replica_and_later_ones_join_and_leave() -> None:
    names = Names("127.0.0.2", "127.0.0.1", "127.0.0.2")
    async with FakeEngine() as one, FakeEngine(host="127.0.0.2", port=one.port) as two:
        settings = {"discovery": {"dns": [f"http://engine:{one.port}"], "interval_s": LOOK_S}}
        async with serve([], resolve=names, **settings) as up:
            assert urls(up) == [one.url, two.url]
            assert names.asked[0] == ("engine", one.port)
            await until(lambda: len(ready(up)) == 2)
            async with FakeEngine(host="127.0.0.3", port=one.port) as three:
                names.addresses = ["127.0.0.3", "127.0.0.1"]
                await until(lambda: ready(up) == {one.url, three.url})
                await until(lambda: urls(up) == [one.url, three.url])
                for number in range(20):
                    assert (await up.completion(f"p{number}")).status_code == 200
                assert two.asked(COMPLETIONS) == []
                assert three.asked(COMPLETIONS)
                names.addresses = OSError(-2, "Name or service not known")
                await until(lambda: up.gateway.discovery.sources[0].problem)
                assert ready(up) == {one.url, three.url}
                assert await up.metric("gateway_discovery_failures_total", kind="dns") >= 1
                await up.settled()


async def test_the_systems_own_resolver_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine() as one:
        names = [f"http://localhost:{one.port}", "http://does-not-exist.invalid:8000"]
        async with serve([], discovery={"dns": names, "interval_s": LOOK_S}) as up:
            assert one.url in urls(up)
            assert (await up.completion("p")).status_code == 200
            await until(lambda: up.gateway.discovery.sources[1].problem)
            assert "does-not-exist.invalid" in str(up.gateway.discovery.status())
            await asyncio.sleep(5 * LOOK_S)
            assert len([r for r in caplog.records if "can't be looked up" in r.message]) == 1


async def test_a_refusal_for_want_of_many_engines_counts_them_instead_of_naming_each(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    write(file, *(f"127.0.1.{host}:9" for host in range(1, 41)))
    async with following(file, wait=False) as up:
        await until(lambda: "of 40 engines 40 are down (no connection" in up.gateway.health.ready()[1])
        refused = await up.completion("p")
        told = "no engine is ready: of 40 engines 40 are down (no connection at its health check)"
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, told)
        write(file, *(f"127.0.1.{host}:9" for host in range(1, 4)))
        await until(lambda: len(urls(up)) == 3)
        assert up.gateway.health.ready()[1].startswith(
            "engine 1 is down (no connection at its health check); engine 2 is"
        )


async def test_no_task_is_left_behind(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    async with FakeEngine() as one, FakeEngine() as other:
        write(file, one, other)
        async with following(file):
            write(file, one)
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in names if name.startswith(("discovery", "monitor", "probe"))]
