"""What a key's group, priority and wishes come to at the engine."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.fakes.engine import MODEL, FakeEngine
from tests.wire.conftest import Running, serve
from tests.wire.guarding import CHAT, keys_file, with_key

# -- tenants -----------------------------------------------------------------------------------------------------------


async def test_a_keys_group_becomes_the_engines_cache_salt_and_without_one_there_is_none(
    engine: FakeEngine, tmp_path: Path
) -> None:
    keys = keys_file(
        tmp_path / "keys.json", plain={}, red={"group": "red"}, blue={"group": "blue"}, red2={"group": "red"}
    )
    async with serve([engine.url], auth={"disabled": False, "keys_file": keys}) as up:
        for name in ("plain", "red", "blue", "red2"):
            await up.client.post("/v1/chat/completions", json=CHAT, headers=with_key(name))
        salts = [seen.json.get("cache_salt") for seen in engine.asked("/v1/chat/completions")]
        assert salts == [None, "red", "blue", "red"]
        assert "cache_salt" not in engine.asked("/v1/chat/completions")[0].json


async def test_keys_of_two_groups_never_share_a_call_and_keys_of_one_do(engine: FakeEngine, tmp_path: Path) -> None:
    keys = keys_file(tmp_path / "keys.json", red={"group": "red"}, blue={"group": "blue"}, red2={"group": "red"})
    async with serve([engine.url], auth={"disabled": False, "keys_file": keys}, batching={"window_ms": 300}) as up:
        engine.service_s = 0.5
        first = asyncio.create_task(_completion(up, "red", "busy"))
        while not engine.asked("/v1/completions"):
            await asyncio.sleep(0.01)
        await asyncio.gather(*(_completion(up, name, name) for name in ("red", "blue", "red2")), first)
        merged = [s.json for s in engine.asked("/v1/completions") if s.json["prompt"] not in ("busy", ["busy"])]
        assert sorted((s["cache_salt"], s["prompt"]) for s in merged) == [("blue", "blue"), ("red", ["red", "red2"])]


async def _completion(up: Running, name: str, prompt: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 1}
    answer = await up.client.post("/v1/completions", json=body, headers=with_key(name))
    assert answer.status_code == 200, answer.text
    return answer


async def test_a_key_that_asks_for_prompt_tokens_details_is_never_merged(engine: FakeEngine, tmp_path: Path) -> None:
    keys = keys_file(tmp_path / "keys.json", exact={"prompt_tokens_details": True}, second={})
    async with serve([engine.url], auth={"disabled": False, "keys_file": keys}, batching={"window_ms": 300}) as up:
        engine.service_s = 0.5
        answers = await asyncio.gather(*(_completion(up, "exact", f"{number}") for number in range(4)))
        assert all(answer.json()["usage"]["prompt_tokens_details"] is not None for answer in answers)
        assert len(engine.asked("/v1/completions")) == 4


@pytest.mark.parametrize(("on", "expected"), [(False, None), (True, -5)])
async def test_a_keys_priority_is_handed_on_only_where_the_policy_says_so(
    engine: FakeEngine, tmp_path: Path, on: bool, expected: int | None
) -> None:
    keys = keys_file(tmp_path / "keys.json", urgent={"priority": -5})
    auth = {"disabled": False, "keys_file": keys}
    async with serve([engine.url], auth=auth, policy={"engine_priority": on}) as up:
        await up.client.post("/v1/chat/completions", json=CHAT, headers=with_key("urgent"))
        assert engine.asked("/v1/chat/completions")[0].json.get("priority") == expected
