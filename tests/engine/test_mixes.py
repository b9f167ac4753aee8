"""Random mixes of requests, merged by the gateway, against each one alone on the same engine."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.engine.conftest import Stack, connected
from tests.engine.test_completions import NEAR_TIE, PROMPTS

COMPLETIONS = "/v1/completions"
ROUNDS = 5  # who shares a 15 ms window is the machine's luck; a mix in which nobody does proves nothing


def mix(dice: random.Random, stack: Stack, ids: list[list[int]]) -> list[dict[str, Any]]:
    """Requests of a few parameter sets, so that some can merge and some must not; one of them can't be served."""
    requests: list[dict[str, Any]] = []
    for _ in range(12):
        one, two = dice.sample(PROMPTS, 2)
        prompt: Any = dice.choice([one, one, [one, two], dice.choice(ids), dice.sample(ids, 2)])
        fields: dict[str, Any] = dice.choice([{}, {}, {"n": 2}, {"stop": ["."]}])
        requests.append(
            {
                "model": stack.model,
                "prompt": prompt,
                "temperature": 0,
                "max_tokens": dice.choice([6, 6, 12]),
                "logprobs": 2,
                "return_token_ids": True,
                **fields,
            }
        )
    requests[dice.randrange(12)]["prompt"] = "word " * 3000
    return requests


def assert_same(alone: dict[str, Any], merged: dict[str, Any]) -> None:
    """The same choices in the same order, each token for token or from a near-tie on; usage follows the tokens."""
    assert len(alone["choices"]) == len(merged["choices"])
    for one, other in zip(alone["choices"], merged["choices"], strict=True):
        assert one["index"] == other["index"]
        assert one["prompt_token_ids"] == other["prompt_token_ids"]
        for place, (expected, got) in enumerate(zip(one["token_ids"], other["token_ids"], strict=False)):
            if expected != got:
                best, second = sorted(one["logprobs"]["top_logprobs"][place].values(), reverse=True)[:2]
                assert best - second < NEAR_TIE, (place, best - second)
                break
        else:
            assert one["token_ids"] == other["token_ids"]
            assert one["finish_reason"] == other["finish_reason"]
    usage = merged["usage"]
    assert usage["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in merged["choices"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("seed", [1, 2])
async def test_in_any_mix_each_answer_is_what_its_client_would_have_got_alone(stack: Stack, seed: int) -> None:
    dice = random.Random(seed)
    ids = [
        stack.engine.post("/tokenize", json={"model": stack.model, "prompt": prompt}).json()["tokens"]
        for prompt in PROMPTS[:4]
    ]
    before = stack.gateway_metric("gateway_merged_requests_total")
    for _ in range(ROUNDS):
        await same_as_alone(stack, mix(dice, stack, ids))
        if stack.gateway_metric("gateway_merged_requests_total") > before:
            return
    pytest.fail(f"nothing merged in {ROUNDS} mixes, nothing proven")


async def same_as_alone(stack: Stack, requests: list[dict[str, Any]]) -> None:
    """Sends them together, then each past the gateway."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=120, trust_env=False) as client:
        await connected(client, len(requests))
        answers = await asyncio.gather(*(client.post(COMPLETIONS, json=request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        alone = stack.engine.post(COMPLETIONS, json=request)
        assert answer.status_code == alone.status_code, answer.text
        if alone.status_code == 200:
            assert_same(alone.json(), answer.json())
        else:
            assert answer.json()["error"]["message"] == alone.json()["error"]["message"]
