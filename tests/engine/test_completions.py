"""Completions on the real engine, and the micro-batcher's promise: merged, each client gets its answer as if alone."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tests.engine.conftest import Stack, connected

# Two answers that are this close in log probability may swap when the batch has another shape: the sums inside a
# matrix product are then taken in another order. Anything wider apart must not differ.
NEAR_TIE = 0.05
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "Water boils at",
    "def add(a, b):\n    return",
    "The three primary colours are",
    "To make bread you need flour,",
    "In 1969, the first humans",
    "1, 2, 3, 4,",
    "Dear Sir or Madam, I am writing to",
    "The opposite of hot is",
    "Photosynthesis is the process by which",
    "My favourite season is autumn because",
)


def body(stack: Stack, prompt: str) -> dict[str, Any]:
    return {
        "model": stack.model,
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": 2,
        "return_token_ids": True,
    }


def assert_same_answer(alone: dict[str, Any], merged: dict[str, Any]) -> None:
    """Token for token the same, or from a near-tie on."""
    one, other = alone["choices"][0], merged["choices"][0]
    assert one["prompt_token_ids"] == other["prompt_token_ids"]
    assert alone["usage"]["prompt_tokens"] == merged["usage"]["prompt_tokens"]
    for place, (expected, got) in enumerate(zip(one["token_ids"], other["token_ids"], strict=False)):
        if expected != got:
            best, second = sorted(one["logprobs"]["top_logprobs"][place].values(), reverse=True)[:2]
            assert best - second < NEAR_TIE, f"token {place} differs though {best - second:.3f} apart"
            return
    assert one["text"] == other["text"]
    assert one["finish_reason"] == other["finish_reason"]
    assert alone["usage"]["completion_tokens"] == merged["usage"]["completion_tokens"]


async def test_merged_completions_are_token_identical_to_single_ones_but_for_near_ties(stack: Stack) -> None:
    alone = [stack.http.post("/v1/completions", json=body(stack, prompt)).json() for prompt in PROMPTS]
    merged_before = stack.gateway_metric("gateway_merged_requests_total")
    prompts_before = stack.engine_metric("vllm:request_success_total")
    async with httpx.AsyncClient(base_url=stack.url, timeout=120, trust_env=False) as client:
        await connected(client, len(PROMPTS))
        replies = await asyncio.gather(*(client.post("/v1/completions", json=body(stack, p)) for p in PROMPTS))
    merged = stack.gateway_metric("gateway_merged_requests_total") - merged_before
    # The first finds an idle engine and goes at once; those that come while it runs are merged, eight to a call.
    assert merged >= 8, f"only {merged} of {len(PROMPTS)} went in a merged call"
    assert stack.engine_metric("vllm:request_success_total") - prompts_before == len(PROMPTS)
    for before, reply in zip(alone, replies, strict=True):
        assert reply.status_code == 200, reply.text
        assert_same_answer(before, reply.json())


async def test_one_over_long_prompt_fails_alone_and_its_neighbours_are_answered(stack: Stack) -> None:
    prompts = [*PROMPTS[:7], "word " * 3000]
    async with httpx.AsyncClient(base_url=stack.url, timeout=120, trust_env=False) as client:
        replies = await asyncio.gather(*(client.post("/v1/completions", json=body(stack, p)) for p in prompts))
    assert [reply.status_code for reply in replies] == [200] * 7 + [400]
    assert "2048" in replies[-1].json()["error"]["message"]


def test_a_prompt_list_of_ones_own_comes_back_in_order(stack: Stack) -> None:
    answer = stack.completion(list(PROMPTS[:3]), max_tokens=4).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert "Paris" in answer["choices"][0]["text"]


def test_token_ids_are_a_prompt_too_and_answer_like_their_text(stack: Stack) -> None:
    text = PROMPTS[0]
    ids = stack.completion(text, max_tokens=1, return_token_ids=True).json()["choices"][0]["prompt_token_ids"]
    by_text, by_ids = (stack.completion(prompt, max_tokens=8).json() for prompt in (text, ids))
    assert by_ids["choices"][0]["text"] == by_text["choices"][0]["text"]


def test_digits_are_tokenized_one_by_one_as_the_model_learned_them(stack: Stack) -> None:
    """ "a  12" is the case that GPT-2's rule splits otherwise: there the second space sticks to the digit."""
    answer = stack.engine.post("/tokenize", json={"model": stack.model, "prompt": "a  12", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["a", "ĠĠ", "1", "2"]
