"""Overload: refused early, truthfully and without the engine noticing; fair between keys; patient with a restart."""

import asyncio
import io
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil
import pytest

from gateway.keys import new_key
from tests.fakes.engine import MODEL, FakeEngine, Script
from tests.wire.conftest import Running, serve

COMPLETIONS = "/v1/completions"


def keys_file(path: Path, **tenants: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Write a keys file; returns the headers for each tenant."""
    entries, headers = [], {}
    for name, fields in tenants.items():
        secret, digest = new_key()
        entries.append({"name": name, "sha256": digest, **fields})
        headers[name] = {"Authorization": f"Bearer {secret}"}
    path.write_text(json.dumps({"keys": entries}))
    return headers


async def ask(up: Running, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    # Not deterministic, so that nothing is coalesced; long enough not to be merged.
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 200, **fields}
    return await up.client.post(COMPLETIONS, json=body, headers=headers)


@dataclass
class Burst:
    """Many requests at once. By aiohttp: httpx would be the bottleneck of a process that it shares with the gateway."""

    codes: list[int] = field(default_factory=list)
    refusals: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # Retry-After, error

    async def send(self, up: Running, count: int) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(self._one(session, up, f"p{i}") for i in range(count)))

    async def _one(self, session: aiohttp.ClientSession, up: Running, prompt: str) -> None:
        body = {"model": MODEL, "max_tokens": 200, "prompt": prompt}
        async with session.post(up.url + COMPLETIONS, json=body) as answer:
            document = await answer.json()
            self.codes.append(answer.status)
            if answer.status != 200:
                self.refusals.append((int(answer.headers["Retry-After"]), document["error"]))


async def queued(up: Running, count: int) -> None:
    while up.gateway.admission.queued < count:
        await asyncio.sleep(0.001)


async def test_ten_times_too_much_is_refused_and_what_is_accepted_is_served() -> None:
    async with (
        FakeEngine(kv_tokens=1000, slots=4, service_s=0.05) as engine,
        serve([engine.url], admission={"max_queue_tokens": 8000, "max_wait_s": 5}) as up,
    ):
        rss = psutil.Process().memory_info().rss
        burst = Burst()
        await burst.send(up, 600)
        assert set(burst.codes) == {200, 429}
        served, refused = burst.codes.count(200), burst.codes.count(429)
        assert served >= 36, burst.refusals  # what the queue holds, and what went at once
        assert len(engine.asked(COMPLETIONS)) == served, "a refused request reached the engine"
        assert all(retry_after >= 1 for retry_after, _ in burst.refusals)
        assert all(error["type"] == "rate_limit_error" for _, error in burst.refusals)
        assert await up.metric("gateway_shed_total", tenant="anonymous") == refused
        assert psutil.Process().memory_info().rss - rss < 100 * 2**20
        await up.settled()


async def test_a_refusal_takes_less_than_10_ms() -> None:
    async with (
        FakeEngine(kv_tokens=300, slots=1) as engine,
        serve([engine.url], admission={"max_queue_tokens": 0}) as up,
    ):
        engine.script(COMPLETIONS, Script(hang=True))
        hold = asyncio.create_task(ask(up, "hold"))
        while not engine.asked(COMPLETIONS):
            await asyncio.sleep(0.001)
        times = []
        for i in range(60):
            begin = time.perf_counter()
            assert (await ask(up, f"p{i}")).status_code == 429
            times.append(time.perf_counter() - begin)
        assert statistics.median(times) < 0.010, times
        assert len(engine.asked(COMPLETIONS)) == 1
        hold.cancel()


async def test_retry_after_is_within_half_of_the_real_wait() -> None:
    # Four at a time, so sixteen a second.
    async with (
        FakeEngine(kv_tokens=860, slots=4, service_s=0.25) as engine,
        serve([engine.url], admission={"max_wait_s": 60}) as up,
    ):
        load = [asyncio.create_task(ask(up, f"load {i}")) for i in range(120)]
        await queued(up, 90)
        while len(engine.asked(COMPLETIONS)) < 15:  # by then the gate has seen it drain under saturation
            await asyncio.sleep(0.01)
        patience = {"X-Request-Timeout-S": "0.1"}
        begin = time.monotonic()
        refused = await ask(up, "impatient", patience)
        assert refused.status_code == 429
        promised = int(refused.headers["retry-after"])
        assert promised >= 3, "too short a wait to judge the promise by"
        while (await ask(up, "again", patience)).status_code == 429:
            await asyncio.sleep(0.05)
        real = time.monotonic() - begin
        assert 0.5 * real <= promised <= 1.5 * real, (promised, real)
        await asyncio.gather(*load)


async def test_500_queued_requests_of_one_key_cost_another_one_service_time_at_most(tmp_path: Path) -> None:
    headers = keys_file(tmp_path / "keys.json", greedy={}, modest={})
    service_s = 0.1
    async with FakeEngine(kv_tokens=820, slots=4, service_s=service_s) as engine:
        settings = {
            "auth": {"disabled": False, "keys_file": str(tmp_path / "keys.json")},
            "admission": {"max_wait_s": 600, "max_queue_tokens": 10**9},
        }
        async with serve([engine.url], **settings) as up:

            async def median_wait() -> float:
                times = []
                for i in range(9):
                    begin = time.monotonic()
                    assert (await ask(up, f"modest {i}", headers["modest"])).status_code == 200
                    times.append(time.monotonic() - begin)
                return statistics.median(times)

            alone = await median_wait()
            greedy = [asyncio.create_task(ask(up, f"greedy {i}", headers["greedy"])) for i in range(500)]
            try:
                await queued(up, 400)
                begin, served = time.monotonic(), len(engine.asked(COMPLETIONS))
                beside = await median_wait()
                # The service time as it really was with 500 clients in the engine's own process: four at a time.
                real_s = 4 * (time.monotonic() - begin) / (len(engine.asked(COMPLETIONS)) - served)
            finally:
                for task in greedy:
                    task.cancel()
                await asyncio.gather(*greedy, return_exceptions=True)
            raised_s = (beside - real_s) - (alone - service_s)  # waiting only: serving got slower for everybody
            assert raised_s <= real_s * 1.1, (alone, beside, real_s)
            await up.settled()


async def test_a_request_cancelled_in_the_queue_never_reaches_the_engine() -> None:
    async with FakeEngine(kv_tokens=300, slots=1) as engine, serve([engine.url]) as up:
        engine.script(COMPLETIONS, Script(delay_s=0.3))
        first = asyncio.create_task(ask(up, "first"))
        while not engine.asked(COMPLETIONS):
            await asyncio.sleep(0.001)
        leaving = asyncio.create_task(ask(up, "leaving"))
        await queued(up, 1)
        leaving.cancel()
        while up.gateway.admission.queued:
            await asyncio.sleep(0.001)
        await first
        await ask(up, "next")
        assert [seen.json["prompt"] for seen in engine.asked(COMPLETIONS)] == ["first", "next"]
        assert await up.metric("gateway_cancelled_total", phase="queued") == 1


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "1e9", ""])
async def test_a_deadline_that_is_none_is_a_400(up: Running, value: str) -> None:
    answer = await ask(up, "p", {"X-Request-Timeout-S": value})
    assert answer.status_code == 400
    assert "X-Request-Timeout-S" in answer.json()["error"]["message"]


async def test_the_capacity_is_the_engines_own_figure(engine: FakeEngine) -> None:
    engine.kv_tokens = 12_345
    async with serve([engine.url]) as up:
        assert await up.metric("gateway_capacity_tokens") == 12_345


async def test_the_keys_priority_reaches_an_engine_that_schedules_by_it(engine: FakeEngine, tmp_path: Path) -> None:
    headers = keys_file(tmp_path / "keys.json", urgent={"priority": -5})
    auth = {"disabled": False, "keys_file": str(tmp_path / "keys.json")}
    async with serve([engine.url], auth=auth, policy={"engine_priority": True}) as up:
        assert (await ask(up, "p", headers["urgent"])).status_code == 200
        assert engine.asked(COMPLETIONS)[0].json["priority"] == -5


@pytest.mark.parametrize(
    ("limits", "cause"),
    [
        ({"requests_per_minute": 1}, "key_requests"),
        ({"tokens_per_minute": 250}, "key_tokens"),
        ({"concurrent": 1}, "key_concurrency"),
    ],
    ids=["requests", "tokens", "concurrent"],
)
async def test_a_key_that_is_over_its_own_limit_is_told_so_and_others_are_not_touched(
    engine: FakeEngine, tmp_path: Path, limits: dict[str, int], cause: str
) -> None:
    headers = keys_file(tmp_path / "keys.json", limited=limits, free={})
    async with serve([engine.url], auth={"disabled": False, "keys_file": str(tmp_path / "keys.json")}) as up:
        engine.script(COMPLETIONS, Script(delay_s=0.3))
        first = asyncio.create_task(ask(up, "first", headers["limited"]))
        while not engine.asked(COMPLETIONS):
            await asyncio.sleep(0.001)
        second = await ask(up, "second", headers["limited"])
        assert second.status_code == 429
        assert second.headers["retry-after"]
        assert second.json()["error"]["type"] == "rate_limit_error"
        assert (await ask(up, "other", headers["free"])).status_code == 200
        assert (await first).status_code == 200
        assert await up.metric("gateway_shed_total", cause=cause, tenant="limited") == 1
        assert [seen.json["prompt"] for seen in engine.asked(COMPLETIONS)] == ["first", "other"]


async def test_a_request_that_got_no_answer_costs_its_key_no_tokens(engine: FakeEngine, tmp_path: Path) -> None:
    headers = keys_file(tmp_path / "keys.json", limited={"tokens_per_minute": 1000})
    async with serve([engine.url], auth={"disabled": False, "keys_file": str(tmp_path / "keys.json")}) as up:
        too_long = await ask(up, "typo", headers["limited"], max_tokens=10_000_000)
        assert too_long.status_code == 400
        engine.script(COMPLETIONS, Script(reset_before_answer=True))
        assert (await ask(up, "unlucky", headers["limited"], max_tokens=900)).status_code == 502
        assert (await ask(up, "normal", headers["limited"], max_tokens=900)).status_code == 200


async def test_a_request_that_does_not_fit_yet_stops_no_other_key(tmp_path: Path) -> None:
    headers = keys_file(tmp_path / "keys.json", long={}, large={}, small={})
    auth = {"disabled": False, "keys_file": str(tmp_path / "keys.json")}
    async with FakeEngine(kv_tokens=10_000) as engine, serve([engine.url], auth=auth) as up:
        engine.script(COMPLETIONS, Script(delay_s=2))
        long = asyncio.create_task(ask(up, "long", headers["long"]))
        while not engine.asked(COMPLETIONS):
            await asyncio.sleep(0.001)
        large = asyncio.create_task(ask(up, "large", headers["large"], max_tokens=8000, n=2))
        await queued(up, 1)
        async with asyncio.timeout(1.5):
            for i in range(3):
                assert (await ask(up, f"small {i}", headers["small"], max_tokens=20)).status_code == 200
        assert not large.done()
        await asyncio.gather(long, large)


async def test_a_body_of_millions_of_parts_is_refused_before_it_costs_anything(up: Running) -> None:
    body = b'{"model":"no-such-model","messages":[' + b"{}," * 2_000_000 + b"{}]}"
    begin = time.process_time()
    async with aiohttp.ClientSession() as session:
        answer = await session.post(
            up.url + "/v1/chat/completions", data=io.BytesIO(body), headers={"Content-Type": "application/json"}
        )
    assert answer.status == 400
    assert "objects and lists" in (await answer.json())["error"]["message"]
    assert time.process_time() - begin < 1.0  # client, engine and gateway together; parsing alone took 5 s


async def test_a_prompt_full_of_brackets_and_commas_is_only_text(up: Running) -> None:
    assert (await up.completion("[{,}]" * 200_000, max_tokens=1)).status_code in (200, 400)
    answer = await up.completion("[{,}]" * 200_000, max_tokens=1)
    assert "objects and lists" not in answer.text


# -- the waiting room --------------------------------------------------------------------------------------------------


async def test_an_engines_restart_fails_no_request(engine: FakeEngine) -> None:
    async with serve([engine.url]) as up:
        await engine.stop()
        requests = [asyncio.create_task(ask(up, f"p{i}")) for i in range(20)]
        while up.gateway.edge.open < 20:
            await asyncio.sleep(0.001)
        await engine.start()
        assert {answer.status_code for answer in await asyncio.gather(*requests)} == {200}
        assert len(engine.asked(COMPLETIONS)) == 20
        await up.settled()


async def test_nor_does_it_fail_what_waited_behind_those_in_flight() -> None:
    """A queue that may wait 0.3 s survives a restart that takes longer."""
    async with (
        FakeEngine(kv_tokens=450, service_s=0.01) as engine,
        serve([engine.url], admission={"max_wait_s": 0.3}) as up,
    ):
        await engine.stop()
        requests = [asyncio.create_task(ask(up, f"p{i}")) for i in range(12)]
        while up.gateway.edge.open < 12 or not up.gateway.admission.queued:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.5)  # the restart, longer than max_wait_s
        await engine.start()
        assert {answer.status_code for answer in await asyncio.gather(*requests)} == {200}
        await up.settled()


async def test_the_waiting_room_is_bounded(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"reload_wait_s": 0.2}) as up:
        await engine.stop()
        answer = await ask(up, "p")
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert "engine 1 is down" in answer.json()["error"]["message"]
        await up.settled()


async def test_an_engine_that_never_came_up_is_a_503_at_once(engine: FakeEngine) -> None:
    await engine.stop()
    async with serve([engine.url], wait=False) as up:
        async with asyncio.timeout(2):  # reload_wait_s is 120
            answer = await ask(up, "p")
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert engine.url not in answer.text, "an internal address in an error body"
        await engine.start()
        async with asyncio.timeout(5):
            while (await ask(up, "p")).status_code != 200:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize(("prefix_caching", "least", "most"), [(True, 6, 9), (False, 2, 2)])
async def test_requests_that_share_a_long_beginning_run_at_once_where_the_engine_caches_it(
    prefix_caching: bool, least: int, most: int
) -> None:
    """Some 1,000 tokens in common, 200 of their own, and room for 3,000."""
    scripted = FakeEngine(kv_tokens=3000, service_s=0.3, prefix_caching=prefix_caching)
    async with scripted as engine, serve([engine.url]) as up:
        document = "".join(f"{number:07d} " for number in range(500))
        answers = await asyncio.gather(*(ask(up, f"{document} question {number}") for number in range(12)))
        assert {answer.status_code for answer in answers} == {200}
        assert least <= engine.peak <= most
