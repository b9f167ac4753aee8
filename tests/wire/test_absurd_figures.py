"""Figures that can't be true, told by one engine, harm neither the others nor what the gateway says of them all."""

import json
from typing import Any

import pytest

from gateway.replica import State
from gateway.replicas import Replicas
from tests.fakes.engine import MODEL, FakeEngine
from tests.wire.conftest import serve, until
from tests.wire.workers import ADMIN, TOKEN

BUSY = """
vllm:num_requests_running{engine="0"} 5
vllm:num_requests_waiting{engine="0"} 5
vllm:kv_cache_usage_perc{engine="0"} 1
vllm:num_preemptions_total{engine="0"} 3
vllm:request_success_total{engine="0"} 5
vllm:prompt_tokens_total{engine="0"} 500
"""


@pytest.mark.parametrize("digits", [20, 400, 4000, 5000])
@pytest.mark.parametrize("labels", ['kv_cache_size_tokens="%s"', 'num_gpu_blocks="%s",block_size="%s"'])
async def test_a_cache_of_absurd_size_is_one_of_unknown_size(
    labels: str, digits: int, engine: FakeEngine, tmp_path: Any
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    async with FakeEngine() as absurd:
        config = labels.replace("%s", "9" * digits)
        absurd.metrics_page = f"{BUSY}vllm:cache_config_info{{{config}}} 1.0\n"
        auth = {"admin_token_file": tmp_path / "token"}
        async with serve([absurd.url, engine.url], auth=auth) as up:
            await until(lambda: len(up.gateway.replicas.ready()) == 2)
            # By asking twice there is a window to judge: advice is arithmetic on what engines tell.
            for _ in range(2):
                status = await up.client.get(f"{up.admin_url}/status", headers=ADMIN)
                assert status.status_code == 200
            assert [row["capacity_tokens"] for row in status.json()["replicas"]] == [None, engine.kv_tokens]
            assert status.json()["admission"]["capacity_tokens"] == engine.kv_tokens
            answers = [await up.completion(f"p{i}", temperature=1) for i in range(4)]
            assert {answer.status_code for answer in answers} == {200}
            await up.settled()


@pytest.mark.parametrize("length", [0, -1_000_000, True, 1.5, "8192"])
async def test_a_length_that_can_not_be_makes_no_list_of_models(length: Any, engine: FakeEngine) -> None:
    """Taken at its word, a model of negative length would make a request cost less than nothing."""
    async with FakeEngine() as absurd:
        absurd.models_page = json.dumps({"data": [{"id": MODEL, "max_model_len": length}]})
        async with serve([absurd.url, engine.url]) as up:
            odd, _ = up.gateway.replicas.all
            await until(lambda: "no list of models" in odd.reason)
            assert odd.state is State.WARMING
            assert (await up.completion("hello", max_tokens=5)).status_code == 200
            assert not absurd.asked("/v1/completions")
            absurd.models_page = None
            await until(lambda: len(up.gateway.replicas.ready()) == 2)


async def test_no_bug_in_judging_an_engine_makes_the_gateway_forget_it(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, failed = Replicas.learned, []

    def fails(replicas: Replicas) -> None:
        if len(failed) < 4:
            failed.append(1)
            raise TypeError("a bug")
        usual(replicas)

    monkeypatch.setattr(Replicas, "learned", fails)
    async with serve([engine.url]) as up:
        assert len(failed) == 4
        assert (await up.chat()).status_code == 200
