"""What /status and /metrics say about the stack's limits: from the gateway's own figures and the engines' pages."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.findings import KINDS
from gateway.prefixes import OUTCOMES
from gateway.replicas import State
from tests.fakes.engine import FakeEngine, Script
from tests.wire.conftest import Running, serve, until

TOKEN = "admin-token-0123456789abcdef0123456789"
PAGE = """\
vllm:num_requests_running{engine="0"} RUNNING
vllm:num_requests_waiting{engine="0"} 4
vllm:kv_cache_usage_perc{engine="0"} 0.99
vllm:num_preemptions_total{engine="0"} PREEMPTIONS
vllm:prompt_tokens_total{engine="0"} 1000
vllm:generation_tokens_total{engine="0"} RUNNING
vllm:cache_config_info{block_size="16",kv_cache_size_tokens="100000",num_gpu_blocks="1",cache_dtype="auto"} 1.0
"""


@pytest.fixture
def admin(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "admin_token").write_text(TOKEN)
    return {"auth": {"admin_token_file": str(tmp_path / "admin_token")}}


async def findings(up: Running) -> dict[str, dict[str, Any]]:
    answer = await up.client.get(f"{up.admin_url}/status", headers={"Authorization": f"Bearer {TOKEN}"})
    return {finding["kind"]: finding for finding in answer.json()["advice"]["findings"]}


async def test_status_says_what_limits_with_numbers_and_where_to_read_on(
    engine: FakeEngine, admin: dict[str, Any]
) -> None:
    async with serve([engine.url], **admin) as up:
        assert list(await findings(up)) == ["idle"]
        engine.metrics_page = PAGE.replace("RUNNING", "9").replace("PREEMPTIONS", "0")
        await until(lambda: "kv_cache_usage" in up.gateway.replicas.all[0].page)
        await findings(up)
        engine.metrics_page = PAGE.replace("RUNNING", "11").replace("PREEMPTIONS", "3")
        await until(lambda: 'preemptions_total{engine="0"} 3' in up.gateway.replicas.all[0].page)
        finding = (await findings(up))["kv_pressure"]
        assert finding["severity"] == "warning"
        assert finding["numbers"]["preemptions"] == 3
        assert finding["numbers"]["fp8_pool_tokens"] == 200_000
        assert finding["doc"] == "docs/advise.md#kv_pressure"
        assert await up.metric("gateway_advice", kind="kv_pressure", severity="warning") == 1


async def test_every_kind_of_advice_is_always_on_the_page_as_0_or_1(up: Running) -> None:
    page = await up.metrics_page()
    lines = [line for line in page.splitlines() if line.startswith("gateway_advice{")]
    assert len(lines) == len(KINDS)
    assert {line.rpartition(" ")[2] for line in lines} <= {"0.0", "1.0"}


async def test_settings_that_limit_are_on_the_page_before_the_first_request(up: Running) -> None:
    page = await up.metrics_page()
    for name, value in (("max_in_flight", 1024), ("window_ms", 15), ("capacity_tokens", 0), ("stall_s", 60)):
        assert f'gateway_setting{{name="{name}"}} {float(value)}' in page


async def test_an_engine_that_went_away_is_critical_in_status(admin: dict[str, Any]) -> None:
    async with FakeEngine() as engine, serve([engine.url], **admin) as up:
        await engine.stop()
        await until(lambda: up.gateway.replicas.all[0].state is State.DOWN)
        assert (await findings(up))["engine_absent"]["severity"] == "critical"


async def test_a_drained_engine_is_told_from_a_dead_one_also_when_it_is_dead_itself(admin: dict[str, Any]) -> None:
    async with FakeEngine() as drained, FakeEngine() as dead, serve([drained.url, dead.url], **admin) as up:
        first, second = up.gateway.replicas.all
        assert up.gateway.replicas.drain(drained.url, True)
        await dead.stop()
        await until(lambda: second.state is State.DOWN)
        for state in (State.DRAINING, State.DOWN):
            await until(lambda: first.state is state)  # noqa: B023
            assert [row["drained"] for row in up.gateway.health.status()["replicas"]] == [True, False]
            assert (await findings(up))["engine_absent"]["numbers"] == {"absent": 1, "drained": 1, "engines": 2}
            assert await up.metric("gateway_replica_drained", replica=drained.url) == 1
            assert await up.metric("gateway_replica_drained", replica=dead.url) == 0
            await drained.stop()


async def test_prompt_tokens_are_counted_by_outcome_and_sum_to_those_of_usage(up: Running) -> None:
    text = "one two three four five six seven eight nine ten " * 10
    for _ in range(2):
        await up.completion(text, max_tokens=3)
    await up.completion(["one two", text], max_tokens=3)
    await up.chat(text)
    async with up.stream(text) as answer:
        await answer.aread()
    await up.settled()
    outcomes = {outcome: await up.metric("gateway_prefix_tokens_total", outcome=outcome) for outcome in OUTCOMES}
    assert sum(outcomes.values()) == await up.metric("gateway_tokens_total", kind="prompt")
    # The scripted engine caches nothing and says so; of a list it could only tell the last prompt's part.
    assert outcomes["evicted"] == outcomes["first_seen"] > 2 * 96
    assert outcomes["repeated"] == 96
    assert outcomes["unknown"] == 0


@pytest.mark.parametrize(
    ("told", "outcome"),
    [({"cached_tokens": 96}, "hit"), ({"cached_tokens": 0}, "evicted"), (None, "repeated"), ("nonsense", "repeated")],
)
async def test_what_an_answer_says_was_cached_decides_whether_a_repeated_prefix_hit(
    engine: FakeEngine, up: Running, told: Any, outcome: str
) -> None:
    text = "word " * 104
    await up.completion(text, max_tokens=1)
    usage = {"prompt_tokens": 105, "completion_tokens": 1, "total_tokens": 106, "prompt_tokens_details": told}
    body = {"id": "cmpl-x", "object": "text_completion", "choices": [{"index": 0, "text": "a"}], "usage": usage}
    engine.script("/v1/completions", Script(body=orjson.dumps(body), headers={"Content-Type": "application/json"}))
    await up.completion(text, max_tokens=1)
    assert await up.metric("gateway_prefix_tokens_total", outcome=outcome) == 96


async def test_an_engine_that_starts_anew_has_lost_what_it_had_read(engine: FakeEngine, up: Running) -> None:
    text = "word " * 104
    await up.completion(text, max_tokens=1)
    await up.completion(text, max_tokens=1)
    assert await up.metric("gateway_prefix_tokens_total", outcome="restarted") == 0
    await until(lambda: (sample := up.gateway.replicas.all[0].progress.last_sample) and sample.tokens > 200)
    engine.counters.clear()
    await until(lambda: up.gateway.replicas.all[0].starts == 1)
    await up.completion(text, max_tokens=1)
    assert await up.metric("gateway_prefix_tokens_total", outcome="restarted") == 96


async def test_a_request_refused_for_its_own_deadline_is_counted_as_that() -> None:
    async with FakeEngine(kv_tokens=400, service_s=0.05) as engine, serve([engine.url]) as up:

        async def keep_busy() -> None:
            while True:
                await up.completion("hello", max_tokens=350)

        async with asyncio.TaskGroup() as group:
            busy = [group.create_task(keep_busy()) for _ in range(8)]
            await until(lambda: (up.gateway.admission.drain_tokens_per_s or 0) > 0 and up.gateway.admission.queued > 4)
            hurried = {"X-Request-Timeout-S": "0.05"}
            body = {"model": engine.models[0], "prompt": "hello", "max_tokens": 350}
            answer = await up.client.post("/v1/completions", json=body, headers=hurried)
            for task in busy:
                task.cancel()
        assert answer.status_code == 429
        assert await up.metric("gateway_deadline_shed_total") == 1
        assert await up.metric("gateway_shed_total", cause="predicted_wait") == 1
        await up.settled()
