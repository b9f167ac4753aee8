"""What the gateway says of itself and of its engines, and that it is true."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.replicas import State
from tests.fakes.engine import MODEL, FakeEngine, Script
from tests.wire.conftest import Running, serve, until

FAST = {"health": {"idle_probe_s": 0.2}, "timeouts": {"stall_s": 1.0, "reload_wait_s": 0.2}}


async def readiness(up: Running) -> tuple[int, dict[str, Any]]:
    answer = await up.client.get("/readyz")
    return answer.status_code, answer.json()


async def test_healthz_is_the_gateways_own_and_readyz_needs_an_engine() -> None:
    engine = FakeEngine()
    async with engine:
        pass  # its port is known now, and nobody listens there
    async with serve([engine.url], wait=False) as up:
        await until(lambda: up.gateway.replicas.all[0].reason != "not looked at yet")
        assert (await up.client.get("/healthz")).json() == {"status": "ok"}
        answer = await up.client.get("/readyz")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert answer.json()["reason"].endswith("is down (no connection at its health check)")


async def test_an_engine_whose_name_nobody_knows_is_told_from_one_that_is_not_up() -> None:
    async with serve(["http://no-such-host.invalid:8000"], wait=False) as up:
        await until(lambda: up.gateway.replicas.all[0].reason == "unknown host name at its health check")


async def test_head_requests_are_answered_for_monitors_that_send_them(up: Running) -> None:
    assert (await up.client.head("/healthz")).status_code == 200
    assert (await up.client.head("/readyz")).status_code == 200


async def test_before_the_first_engine_requests_get_503_and_afterwards_they_are_served_without_a_restart() -> None:
    engine = FakeEngine()
    async with engine:
        pass
    async with serve([engine.url], wait=False) as up:
        refused = await up.chat()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "engine_unavailable"
        async with engine:
            await until(lambda: up.gateway.health.ready()[0])
            assert (await up.chat()).status_code == 200


async def test_an_engine_that_stops_and_comes_back_is_used_again() -> None:
    async with FakeEngine() as engine, serve([engine.url]) as up:
        assert (await up.chat()).status_code == 200
        await engine.stop()
        await until(lambda: up.gateway.replicas.all[0].state is State.DOWN)
        assert (await readiness(up))[0] == 503
        engine.models = ("other-model", engine.models[0])  # it restarted with another profile
        await engine.start()
        await until(lambda: up.gateway.health.ready()[0])
        assert (await up.chat()).status_code == 200
        assert "other-model" in up.gateway.replicas.models


async def test_an_engine_that_hangs_under_load_turns_unready_with_the_reason_and_recovers() -> None:
    async with FakeEngine() as engine, serve([engine.url], **FAST) as up:
        engine.freeze()
        stuck = asyncio.create_task(up.chat())
        await until(lambda: up.gateway.replicas.all[0].state is State.HUNG)
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{engine.url}/health")).status_code == 200
        status, body = await readiness(up)
        assert status == 503
        assert "hung" in body["reason"]
        assert "no forward progress" in body["reason"]
        assert await up.metric("gateway_replica_ready", replica=engine.url) == 0
        assert await up.metric("gateway_replica_stalled_seconds", replica=engine.url) >= 1
        engine.thaw()
        assert (await stuck).status_code == 200
        await until(lambda: up.gateway.health.ready()[0])
        assert (await up.chat()).status_code == 200


async def test_an_engine_that_hung_while_idle_is_found_by_the_probe_though_its_page_says_idle() -> None:
    """A hung engine core leaves the figures on the page as old as the hang."""
    async with FakeEngine() as engine, serve([engine.url], **FAST) as up:
        async with httpx.AsyncClient() as client:
            engine.metrics_page = (await client.get(f"{engine.url}/metrics")).text
        assert "running" in engine.metrics_page
        engine.freeze()
        await until(lambda: up.gateway.replicas.all[0].state is State.HUNG)
        engine.thaw()
        await until(lambda: up.gateway.health.ready()[0])


async def test_a_silent_prefill_below_stall_s_leaves_the_engine_ready() -> None:
    settings = {"health": {"idle_probe_s": 0.2}, "timeouts": {"stall_s": 6.0}}
    async with FakeEngine(slots=1) as engine, serve([engine.url], **settings) as up:
        engine.script("/v1/chat/completions", Script(first_token_s=1.5))
        prefill = asyncio.create_task(_read(up))
        await until(lambda: engine.active)
        while not prefill.done():
            assert up.gateway.replicas.all[0].state is State.READY
            await asyncio.sleep(0.01)
        assert await prefill == 200


async def _read(up: Running) -> int:
    async with up.stream() as answer:
        await answer.aread()
        return int(answer.status_code)


async def test_an_idle_engine_is_probed_now_and_then(engine: FakeEngine) -> None:
    async with serve([engine.url], **FAST):
        before = len(engine.seen)
        await until(lambda: len(engine.seen) >= before + 2)


async def test_an_engine_without_statistics_is_served_and_its_hang_is_still_found(engine: FakeEngine) -> None:
    """--disable-log-stats removes every series; the probe remains."""
    engine.metrics_page = "python_info 1.0\n"
    async with serve([engine.url], **FAST) as up:
        assert (await up.chat()).status_code == 200
        assert up.gateway.replicas.all[0].capacity_tokens is None
        engine.freeze()
        await until(lambda: up.gateway.replicas.all[0].state is State.HUNG)
        engine.thaw()
        await until(lambda: up.gateway.health.ready()[0])


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ('block_size="128",kv_cache_size_tokens="987654",num_gpu_blocks="1"', 987_654),
        ('block_size="16",num_gpu_blocks="1000"', 16_000),
    ],
)
async def test_capacity_is_read_from_new_and_old_labels(engine: FakeEngine, config: str, tokens: int) -> None:
    engine.metrics_page = f"vllm:cache_config_info{{{config}}} 1.0\n"
    async with serve([engine.url]) as up:
        assert up.gateway.admission.capacity_tokens == tokens
        assert await up.metric("gateway_capacity_tokens") == tokens


async def test_something_that_is_no_engine_never_becomes_ready_and_is_named_without_a_traceback(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.models_page = engine.metrics_page = "<!DOCTYPE html><title>It works!</title>"
    async with serve([engine.url], wait=False) as up:
        await until(lambda: "is it a vLLM server?" in up.gateway.replicas.all[0].reason)
        assert (await readiness(up))[0] == 503
        assert not [record for record in caplog.records if record.exc_info]
        engine.models_page = None
        await until(lambda: up.gateway.health.ready()[0])


async def test_an_engine_that_asks_for_a_key_is_told_the_one_in_the_file(engine: FakeEngine, tmp_path: Path) -> None:
    engine.api_key = "engine-canary-key"
    (tmp_path / "engine-key").write_text("engine-canary-key\r\n")
    async with serve([engine.url], engine={"api_key_file": tmp_path / "engine-key"}) as up:
        assert (await up.chat()).status_code == 200
        assert engine.asked("/v1/chat/completions")[0].headers["Authorization"] == "Bearer engine-canary-key"


async def test_an_engine_whose_key_is_missing_says_so_in_readyz(engine: FakeEngine) -> None:
    engine.api_key = "engine-canary-key"
    async with serve([engine.url], wait=False) as up:
        await until(lambda: "engine.api_key_file" in up.gateway.replicas.all[0].reason)
        status, body = await readiness(up)
        assert status == 503
        assert "canary" not in str(body)


async def test_one_late_health_answer_is_forgiven_and_several_are_not(engine: FakeEngine) -> None:
    async with serve([engine.url], health={"timeout_s": 0.3, "max_missed": 3}) as up:
        replica = up.gateway.replicas.all[0]
        engine.health_delay_s = 60
        await until(lambda: replica.missed_looks == 1)
        assert replica.state is State.READY
        engine.health_delay_s = 0
        await until(lambda: replica.missed_looks == 0)
        assert replica.state is State.READY
        engine.health_delay_s = 60
        await until(lambda: replica.state is State.DOWN)
        assert "does not answer" in replica.reason


async def test_a_state_that_stays_is_not_logged_as_a_change(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve([engine.url]) as up:
        replica = up.gateway.replicas.all[0]
        engine.healthy = False
        await until(lambda: "says 503" in replica.reason)
        await engine.stop()
        await until(lambda: "at its health check" in replica.reason)
        lines = [
            (record.message, record.__dict__["fields"]) for record in caplog.records if "replica" in record.message
        ]
    changes = [fields for message, fields in lines if message == "replica state changed"]
    assert changes
    assert all(fields["from"] is not fields["to"] for fields in changes)
    stays = [fields for message, fields in lines if message == "replica state stays, for another reason"]
    assert stays[-1]["state"] is State.DOWN
    assert "at its health check" in stays[-1]["reason"]


async def test_a_first_token_that_fails_keeps_the_engine_out_until_one_comes(engine: FakeEngine) -> None:
    engine.default = Script(status=500, body=b"{}")
    async with serve([engine.url], wait=False) as up:
        await until(lambda: "answered 500" in up.gateway.replicas.all[0].reason)
        assert up.gateway.replicas.all[0].state is State.WARMING
        engine.default = Script()
        await until(lambda: up.gateway.health.ready()[0])


async def test_one_engine_of_two_is_enough_to_be_ready_and_takes_all_the_requests(engine: FakeEngine) -> None:
    async with FakeEngine() as other, serve([engine.url, other.url]) as up:
        await until(lambda: all(replica.state is State.READY for replica in up.gateway.replicas.all))
        await engine.stop()
        await until(lambda: up.gateway.replicas.all[0].state is State.DOWN)
        assert (await readiness(up))[0] == 200
        for number in range(5):
            assert (await up.chat(f"{number}")).status_code == 200
        assert len(other.asked("/v1/chat/completions")) == 5


async def test_the_gateway_leaves_no_probe_behind_when_it_stops(engine: FakeEngine) -> None:
    async with serve([engine.url], **FAST) as up:
        engine.freeze()
        await until(lambda: up.gateway.replicas.all[0].progress.probe_started_s is not None)
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in names if name.startswith(("probe", "monitor", "keys"))]
    engine.thaw()


async def test_an_unexpected_bug_in_a_look_does_not_end_the_looking(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve([engine.url]) as up:
        with monkeypatch.context() as patch:
            patch.setattr("gateway.monitor.read_engine_metrics", _boom)
            await until(lambda: up.gateway.replicas.all[0].state is State.DOWN)
        await until(lambda: up.gateway.health.ready()[0])


def _boom(_: str) -> None:
    raise RuntimeError("boom")


async def test_a_client_that_leaves_a_hung_engine_frees_its_place() -> None:
    async with FakeEngine() as engine, serve([engine.url], **FAST) as up:
        engine.freeze()
        with contextlib.suppress(httpx.ReadTimeout):
            await up.client.post("/v1/chat/completions", json=_CHAT, timeout=0.3)
        await up.settled()
        engine.thaw()


_CHAT = {"model": "fake-8b", "messages": [{"role": "user", "content": "x"}]}


async def test_a_model_that_an_engine_loads_or_unloads_while_it_runs_is_followed(
    engine: FakeEngine, up: Running
) -> None:
    async def asked() -> int:
        return (await up.completion("p", model="adapter")).status_code

    assert await asked() == 404
    engine.models = (MODEL, "adapter")

    async def is_served() -> bool:
        return await asked() == 200

    await until(is_served)
    engine.models_page = "<html>"  # a list that can't be read changes nothing
    await asyncio.sleep(1)
    assert await asked() == 200
    engine.models_page, engine.models = None, (MODEL,)

    async def is_gone() -> bool:
        return await asked() == 404

    await until(is_gone)
    assert (await up.completion("p")).status_code == 200
