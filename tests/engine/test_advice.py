"""Advice on situations that are made, not described: each on a real engine, its figures compared with
the engine's own counters.

The engine is the pinned vLLM with a random model of one thin layer and a pool of 96 blocks: what is judged is its
scheduler, its cache and its counters, and those are the real ones. The gateway runs in the test's own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.advice import advise as judge
from gateway.advisor import Advisor
from gateway.keys import new_key
from gateway.readings import facts, place
from scripts import _ports, _prometheus, advise, model_fetch
from scripts.advising import SourceError, sources
from tests.engine.advising import BLOCK, POOL_BLOCKS, SHAPE, SLOTS, Thin, shares, text, watched
from tests.wire.conftest import until as until_async

SHAPE |= {"num_key_value_heads": 2, "head_dim": 64}


@pytest.fixture(scope="module")
def thin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thin]:
    engine = Thin(tmp_path_factory.mktemp("thin"))
    try:
        engine.start()
        engine.wait()
        yield engine
    finally:
        engine.stop()


async def test_prompts_under_one_block_are_the_misses_and_nothing_is_said_to_be_wrong(thin: Thin) -> None:
    async with watched(thin) as up:
        rng = random.Random("short")
        answers = await up.send_all([text(rng, rng.randint(10, 24)) for _ in range(140)])
        told = sum(answer.json()["usage"]["prompt_tokens"] for answer in answers)
        assert all(answer.json()["usage"]["prompt_tokens"] <= BLOCK for answer in answers)
        finding = (await up.findings())["prefix_misses"]
        assert finding.numbers["missed"] == {"short": told}
        assert told == up.missed() == finding.numbers["queries"]
        assert "Nothing is wrong" in finding.change


async def test_prefixes_that_never_come_back_are_told_from_last_blocks_to_the_token(thin: Thin) -> None:
    async with watched(thin) as up:
        rng = random.Random("unique")
        answers = await up.send_all([text(rng, 120) for _ in range(25)])
        tokens = [answer.json()["usage"]["prompt_tokens"] for answer in answers]
        finding = (await up.findings())["prefix_misses"]
        assert finding.numbers["missed"] == {
            "first_seen": sum((n - 1) // BLOCK * BLOCK for n in tokens),
            "tail": sum(n - (n - 1) // BLOCK * BLOCK for n in tokens),
        }
        assert sum(finding.numbers["missed"].values()) == up.missed()
        assert finding.numbers["cause"] == "first_seen"


async def test_prefixes_that_come_back_hit_and_there_is_nothing_to_advise(thin: Thin) -> None:
    async with watched(thin) as up:
        rng = random.Random("repeated")
        shared = text(rng, 240)
        answers = await up.send_all([f"{shared} {text(rng, 8)}" for _ in range(30)], at_once=1)
        cached = sum(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
        assert cached == up.engine_gained("vllm:prefix_cache_hits_total") > 0.7 * (cached + up.missed())
        assert "prefix_misses" not in await up.findings()
        assert await up.up.metric("gateway_prefix_tokens_total", outcome="hit") == cached
        # What is expected to hit is told without the answer's help, to within the block that a part ends in.
        assert await up.up.metric("gateway_prefix_tokens_total", outcome="evicted") == 0


async def test_prefixes_that_a_small_pool_evicts_before_they_come_back_are_told_by_that(thin: Thin) -> None:
    async with watched(thin) as up:
        rng = random.Random("evicted")
        prompts = [text(rng, 120) for _ in range(40)]  # twice the pool
        first = await up.send_all(prompts, at_once=1)
        again = await up.send_all(prompts, at_once=1)
        tokens = [answer.json()["usage"]["prompt_tokens"] for answer in first]
        cacheable = sum((n - 1) // BLOCK * BLOCK for n in tokens)
        assert sum(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in again) == 0
        finding = (await up.findings())["prefix_misses"]
        # Each prompt's blocks were missed once as new and once as evicted; nothing else was asked of this engine.
        assert finding.numbers["missed"]["evicted"] == finding.numbers["missed"]["first_seen"] == cacheable
        assert sum(finding.numbers["missed"].values()) == up.missed()
        assert shares(finding)["evicted"] == pytest.approx(cacheable / up.missed())


async def test_what_another_groups_salt_hides_is_told_by_key(thin: Thin, tmp_path: Path) -> None:
    secrets = {}
    entries = []
    for name in ("red", "blue"):
        secrets[name], digest = new_key()
        entries.append({"name": name, "sha256": digest, "group": name})
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    auth = {"disabled": False, "keys_file": str(tmp_path / "keys.json")}
    async with watched(thin, auth=auth) as up:
        rng = random.Random("salted")
        prompts = [text(rng, 240) for _ in range(5)]
        headers = {name: {"Authorization": f"Bearer {secret}"} for name, secret in secrets.items()}
        await up.send_all(prompts, headers=headers["red"])
        answers = await up.send_all(prompts, headers=headers["blue"])
        tokens = [answer.json()["usage"]["prompt_tokens"] for answer in answers]
        by_key = (await up.findings())["prefix_misses"].numbers["by_key"]
        assert by_key["blue"]["salted"] == sum((n - 1) // BLOCK * BLOCK for n in tokens)
        assert "first_seen" not in by_key["blue"]
        assert by_key["red"]["first_seen"] == by_key["blue"]["salted"]


async def test_requests_that_preempt_each_other_are_pressure_with_numbers_of_this_pool(thin: Thin) -> None:
    # The gateway would let in no more than the pool holds; this one is told that it holds more.
    async with watched(thin, admission={"capacity_tokens": 100_000}) as up:
        rng = random.Random("pressure")
        answers = await up.send_all([text(rng, 40) for _ in range(SLOTS)], at_once=SLOTS, max_tokens=600)
        assert {answer.status_code for answer in answers} == {200}
        finding = (await up.findings())["kv_pressure"]
        assert finding.numbers["preemptions"] == up.engine_gained("vllm:num_preemptions_total") > 0
        assert finding.numbers["pool_tokens"] == POOL_BLOCKS * BLOCK
        usage = [answer.json()["usage"] for answer in answers]
        mean = sum(told["total_tokens"] for told in usage) / len(usage)
        assert finding.numbers["request_tokens"] == pytest.approx(mean, rel=0.01)
        assert finding.numbers["max_num_seqs"] <= POOL_BLOCKS * BLOCK / mean
        assert f"take num-gpu-blocks-override ({POOL_BLOCKS})" in finding.change


async def test_requests_that_wait_for_a_slot_beside_an_empty_pool_are_told_from_pressure(thin: Thin) -> None:
    async with watched(thin) as up:
        rng = random.Random("slots")
        await up.send_all([text(rng, 8) for _ in range(4 * SLOTS)], at_once=4 * SLOTS, max_tokens=64, stream=True)
        found = await up.findings()
        assert found["engine_slots"].numbers["running_max"] == SLOTS
        assert "kv_pressure" not in found


async def test_a_queue_that_refuses_is_told_with_its_own_limit_and_counts(thin: Thin) -> None:
    limits = {"max_queue_tokens": 400, "capacity_tokens": 400}
    async with watched(thin, admission=limits) as up:
        rng = random.Random("queue")
        answers = await up.send_all([text(rng, 8) for _ in range(40)], at_once=40, max_tokens=100, stream=True)
        refused = sum(answer.status_code == 429 for answer in answers)
        finding = (await up.findings())["gateway_queue"]
        assert finding.numbers["refused"] == refused > 10
        assert finding.numbers["requests"] == 40
        assert "Unset admission.capacity_tokens (400)" in finding.change
        assert f"{POOL_BLOCKS * BLOCK:,} tokens" in finding.change


async def test_deadlines_that_the_queue_cannot_meet_are_told_from_its_own_refusals(thin: Thin) -> None:
    async with watched(thin, admission={"capacity_tokens": 300}) as up:
        rng = random.Random("deadline")
        hurried = {"headers": {"X-Request-Timeout-S": "0.2"}}
        async with asyncio.TaskGroup() as group, up.looking():
            patient = [group.create_task(up.send(text(rng, 8), max_tokens=250, stream=True)) for _ in range(8)]
            await until_async(lambda: up.up.gateway.admission.drain_tokens_per_s is not None)
            answers = [await up.send(text(rng, 8), max_tokens=250, stream=True, **hurried) for _ in range(5)]
        assert {task.result().status_code for task in patient} == {200}
        assert {answer.status_code for answer in answers} == {429}
        assert (await up.findings())["deadline_sheds"].numbers["refused"] == 5


async def test_one_key_that_fills_the_stack_while_another_is_refused_is_named(thin: Thin, tmp_path: Path) -> None:
    (greedy, one), (modest, two) = new_key(), new_key()
    entries = [{"name": "greedy", "sha256": one}, {"name": "modest", "sha256": two, "requests_per_minute": 2}]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    async with watched(thin, auth={"disabled": False, "keys_file": str(tmp_path / "keys.json")}) as up:
        rng = random.Random("hog")
        await up.send_all([text(rng, 100) for _ in range(12)], headers={"Authorization": f"Bearer {greedy}"})
        answers = await up.send_all(["hello"] * 5, headers={"Authorization": f"Bearer {modest}"})
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
        finding = (await up.findings())["tenant_hog"]
        assert (finding.numbers["key"], finding.numbers["others_refused"]) == ("greedy", 3)


async def test_a_window_in_which_nobody_meets_is_told_with_what_it_costs(thin: Thin) -> None:
    async with watched(thin) as up, asyncio.TaskGroup() as group:
        rng = random.Random("window")
        group.create_task(up.send("once upon a time", max_tokens=1200, stream=True))
        await until_async(lambda: up.up.gateway.replicas.all[0].in_flight)
        for _ in range(22):
            await up.send(text(rng, 8))
        finding = (await up.findings())["idle_window"]
        assert finding.numbers["waited"] >= 20
        assert finding.numbers["mean_wait_ms"] >= 14


@contextlib.contextmanager
def prometheus(folder: Path, targets: dict[str, str]) -> Iterator[str]:
    """The real one with the project's configuration; its URL."""
    program = _prometheus.find(model_fetch.model_dir().parent.parent)
    address = f"{_ports.HOST}:{_ports.free_port()}"
    _prometheus.write_configuration(folder / "prometheus.yml", targets)
    options = ("--config.file", str(folder / "prometheus.yml"), "--storage.tsdb.path", str(folder / "data"))
    guard = (sys.executable, "-m", "scripts._guard", "--parent", str(os.getpid()), "--")
    command = (*guard, str(program), *options, "--web.listen-address", address, "--log.level", "error")
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


async def test_prometheus_gives_the_same_figures_as_the_pages(
    thin: Thin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with watched(thin) as up:
        rng = random.Random("prometheus")
        with (
            prometheus(tmp_path, {"engine": place(thin.url), "gateway": place(up.up.admin_url)}) as url,
            httpx.Client(trust_env=False) as client,
        ):

            async def scraped() -> bool:
                """Two readings with both in them, so that the first of any later look is before the traffic."""
                with contextlib.suppress(SourceError):
                    found = await asyncio.to_thread(sources.from_prometheus, client, url, 20)
                    return sum(bool(reading.gateway and reading.engines) for reading in found) >= 2
                return False

            await until_async(scraped, 30)
            await up.send_all([text(rng, 120) for _ in range(25)])
            finding = (await up.findings())["prefix_misses"]

            async def same() -> bool:
                assert await asyncio.to_thread(advise.main, ["--prometheus", url, "--window", "20", "--json"]) < 2
                found = json.loads(capsys.readouterr().out)["findings"]
                return [told["numbers"].get("missed") for told in found] == [finding.numbers["missed"]]

            await until_async(same, 10)


async def test_an_idle_stack_gets_no_advice(thin: Thin) -> None:
    async with watched(thin) as up:
        await up.send("hello")
        assert list(await up.findings()) == ["idle"]


async def test_after_a_restart_the_cause_is_the_restart_and_make_advise_says_the_same(
    thin: Thin, capsys: pytest.CaptureFixture[str]
) -> None:
    async with watched(thin) as up:
        rng = random.Random("restart")
        prompts = [text(rng, 240) for _ in range(8)]
        await up.send_all(prompts)
        await asyncio.to_thread(thin.stop)
        await until_async(lambda: not up.up.gateway.replicas.ready())
        assert "engine_absent" in {finding.kind for finding in up.advisor.look()[1]}
        await asyncio.to_thread(thin.start)
        await asyncio.to_thread(thin.wait)
        await until_async(lambda: up.up.gateway.replicas.ready(), 30)
        await up.fresh_page()
        up.before, up.advisor = (
            thin.page(),
            Advisor(
                up.up.gateway.settings, up.up.gateway.metrics, up.up.gateway.replicas, asyncio.get_running_loop().time
            ),
        )
        up.advisor.look()
        with httpx.Client(trust_env=False) as client:
            pages = await asyncio.to_thread(sources.from_pages, client, up.up.admin_url, (), 0)
            answers = await up.send_all(prompts, at_once=1)
            tokens = [answer.json()["usage"]["prompt_tokens"] for answer in answers]
            pages += await asyncio.to_thread(sources.from_pages, client, up.up.admin_url, (), 0)
        finding = (await up.findings())["prefix_misses"]
        assert finding.numbers["missed"] == {
            "restarted": sum((n - 1) // BLOCK * BLOCK for n in tokens),
            "tail": sum(n - (n - 1) // BLOCK * BLOCK for n in tokens),
        }
        assert sum(finding.numbers["missed"].values()) == up.missed()
        assert [told.numbers for told in judge(facts(pages))] == [finding.numbers]
        assert await asyncio.to_thread(advise.main, ["--gateway-admin", up.up.admin_url, "--window", "1"]) == 0
        assert "hardly anything to do" in capsys.readouterr().out
