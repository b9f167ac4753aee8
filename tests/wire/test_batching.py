"""Micro-batching: what merges, what must not, and that nobody can tell by the answer."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.engine import MODEL, POISON, FakeEngine, Script
from tests.wire.conftest import Running, serve
from tests.wire.test_overload import keys_file

COMPLETIONS = "/v1/completions"
# A window no test waits out: groups leave because they are full, or because the replica runs dry.
LONG_WINDOW = {"batching": {"window_ms": 1000}}


async def busy(engine: FakeEngine, up: Running, delay_s: float = 0.2) -> asyncio.Task[httpx.Response]:
    """Keep the replica occupied for a while, so that what comes now may wait for company."""
    before = engine.active
    engine.script("/v1/chat/completions", Script(delay_s=delay_s))
    task = asyncio.create_task(up.chat("keep busy"))
    while engine.active == before:
        await asyncio.sleep(0.001)
    return task


def comparable(answer: httpx.Response) -> dict[str, Any]:
    """An answer without what differs between any two requests, and without the figure that merging leaves out."""
    document = answer.json()
    for name in ("id", "created"):
        document.pop(name, None)
    document.get("usage", {}).pop("prompt_tokens_details", None)
    return {"status": answer.status_code, **document}


async def test_a_lone_request_never_waits(engine: FakeEngine) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        async with asyncio.timeout(0.9):  # the window is 1 s
            assert (await up.completion("hello", temperature=0)).status_code == 200
        assert await up.metric("gateway_microbatch_wait_seconds_count") == 0


async def test_requests_that_come_together_become_one_prompt_list(engine: FakeEngine) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        first = await busy(engine, up)
        answers = await asyncio.gather(*(up.completion(f"prompt {i}", temperature=0) for i in range(4)))
        await first
        assert [seen.json["prompt"] for seen in engine.asked(COMPLETIONS)] == [[f"prompt {i}" for i in range(4)]]
        assert await up.metric("gateway_merged_requests_total") == 4
        for i, answer in enumerate(answers):
            alone = await up.completion(f"prompt {i}", temperature=0)
            assert comparable(answer) == comparable(alone)
        assert len({answer.json()["id"] for answer in answers}) == 4


async def test_a_full_group_leaves_without_waiting_for_the_window(engine: FakeEngine) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        first = await busy(engine, up, 0.8)
        async with asyncio.timeout(0.7):
            await asyncio.gather(*(up.completion(f"p{i}", temperature=0) for i in range(8)))
        await first
        assert len(engine.asked(COMPLETIONS)) == 1


async def test_a_group_leaves_as_soon_as_the_replica_has_nothing_of_ours(engine: FakeEngine) -> None:
    async with serve([engine.url], batching={"window_ms": 1000}) as up:
        first = await busy(engine, up, 0.1)
        async with asyncio.timeout(0.8):
            await asyncio.gather(up.completion("a", temperature=0), up.completion("b", temperature=0))
        await first


async def test_the_token_budget_closes_a_group_before_the_count_does(engine: FakeEngine) -> None:
    async with serve([engine.url], batching={"window_ms": 1000, "max_prompts": 100, "max_tokens": 100}) as up:
        first = await busy(engine, up)
        await asyncio.gather(*(up.completion(f"p{i}", temperature=0, max_tokens=30) for i in range(6)))
        await first
        sizes = [len(seen.json["prompt"]) for seen in engine.asked(COMPLETIONS)]
        assert max(sizes) == 2, sizes


async def test_window_0_turns_merging_off(engine: FakeEngine) -> None:
    async with serve([engine.url], batching={"window_ms": 0}) as up:
        first = await busy(engine, up)
        await asyncio.gather(*(up.completion(f"p{i}", temperature=0) for i in range(5)))
        await first
        assert len(engine.asked(COMPLETIONS)) == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 7},
        {"temperature": 0.5},
        {"temperature": 0.0},  # 0 and 0.0 are different bytes
        {"seed": 3},
        {"stop": ["x"]},
        {"logprobs": 1},
        {"n": 2},
        {"user": "somebody"},
    ],
    ids=str,
)
async def test_parameters_stay_with_their_request(engine: FakeEngine, fields: dict[str, Any]) -> None:
    async with serve([engine.url], batching={"window_ms": 50}) as up:
        first = await busy(engine, up)
        plain = {"temperature": 0, "max_tokens": 5}
        await asyncio.gather(up.completion("a", **plain), up.completion("b", **{**plain, **fields}))
        await first
        assert len(engine.asked(COMPLETIONS)) == 2
        sent = next(seen for seen in engine.asked(COMPLETIONS) if seen.json["prompt"] == "b")
        assert sent.json == {"model": MODEL, "prompt": "b", **plain, **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"max_tokens": 129},
        {"echo": True},
        {"prompt_logprobs": 1},
        {"some_new_field": 1},
    ],
    ids=str,
)
async def test_what_a_list_could_change_goes_straight_through(engine: FakeEngine, fields: dict[str, Any]) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        first = await busy(engine, up, 0.8)
        async with asyncio.timeout(0.7):
            await asyncio.gather(*(up.completion(f"p{i}", temperature=0, **fields) for i in range(3)))
        await first
        assert len(engine.asked(COMPLETIONS)) == 3


async def test_two_equal_requests_at_temperature_1_are_two_generations(engine: FakeEngine) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        first = await busy(engine, up)
        one, other = await asyncio.gather(*(up.completion("same", temperature=1, max_tokens=16) for _ in range(2)))
        await first
        assert engine.asked(COMPLETIONS)[0].json["prompt"] == ["same", "same"]
        assert one.json()["choices"] != other.json()["choices"]


async def test_only_the_guilty_hears_of_a_bad_prompt(engine: FakeEngine) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        first = await busy(engine, up)
        answers = await asyncio.gather(
            *(up.completion(text, temperature=0) for text in ("good 1", f"a {POISON}", "good 2", "good 3"))
        )
        await first
        assert [answer.status_code for answer in answers] == [200, 400, 200, 200]
        assert await up.metric("gateway_microbatch_splits_total", cause="refused") == 1
        assert len(engine.asked(COMPLETIONS)) == 1 + 4


async def test_a_failed_merged_call_is_everybodys_and_is_not_repeated(engine: FakeEngine) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        engine.script(COMPLETIONS, Script(reset_before_answer=True))
        first = await busy(engine, up)
        answers = await asyncio.gather(*(up.completion(f"p{i}", temperature=0) for i in range(3)))
        await first
        assert [answer.status_code for answer in answers] == [502] * 3
        assert len(engine.asked(COMPLETIONS)) == 1
        assert (await up.completion("after", temperature=0)).status_code == 200


ONE = {"text": "a", "token_ids": [1], "prompt_token_ids": [1]}
NUMBERED_TWICE = json.dumps({"id": "cmpl-x", "choices": [{"index": i, **ONE} for i in (0, 0, 1)]}).encode()


@pytest.mark.parametrize(
    ("script", "statuses", "calls"),
    [
        (Script(body=b"not json", headers={"Content-Type": "application/json"}), [502] * 3, 1),
        (Script(body=b'{"object":"list"}', headers={"Content-Type": "application/json"}), [502] * 3, 1),
        (Script(drop_choice=True), [502] * 3, 1),
        (Script(body=NUMBERED_TWICE, headers={"Content-Type": "application/json"}), [502] * 3, 1),
        (Script(drop_token_ids=True), [200] * 3, 4),  # an older engine: no accounting, so each goes alone
        (Script(status=500, body=b'{"error":{"message":"boom"}}'), [500] * 3, 1),
    ],
    ids=["no json", "no choices", "a choice short", "a number twice", "no token ids", "500"],
)
async def test_a_strange_merged_answer_reaches_nobody_as_a_good_one(
    engine: FakeEngine, script: Script, statuses: list[int], calls: int
) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        engine.script(COMPLETIONS, script)
        first = await busy(engine, up, 0.5)  # beyond what three requests take to arrive on a busy machine
        answers = await asyncio.gather(*(up.completion(f"p{i}", temperature=0) for i in range(3)))
        await first
        assert [answer.status_code for answer in answers] == statuses, [answer.text for answer in answers]
        assert len(engine.asked(COMPLETIONS)) == calls
        await up.settled()


async def test_a_member_that_leaves_before_dispatch_is_not_asked_for(engine: FakeEngine) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        first = await busy(engine, up, 0.3)
        leaving = asyncio.create_task(up.completion("leaving", temperature=0))
        staying = [asyncio.create_task(up.completion(f"stay {i}", temperature=0)) for i in range(2)]
        while up.gateway.inference.batcher.waiting < 3:
            await asyncio.sleep(0.001)
        leaving.cancel()
        while up.gateway.inference.batcher.waiting > 2:
            await asyncio.sleep(0.001)
        up.gateway.check_integrity()
        assert [answer.status_code for answer in await asyncio.gather(*staying)] == [200, 200]
        await first
        assert engine.asked(COMPLETIONS)[0].json["prompt"] == ["stay 0", "stay 1"]


async def test_the_last_member_to_leave_ends_the_engines_call(engine: FakeEngine) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        engine.script(COMPLETIONS, Script(delay_s=30))
        first = await busy(engine, up)
        tasks = [asyncio.create_task(up.completion(f"p{i}", temperature=0)) for i in range(3)]
        while not engine.asked(COMPLETIONS):
            await asyncio.sleep(0.001)
        call = engine.asked(COMPLETIONS)[0]
        tasks[0].cancel()
        tasks[1].cancel()
        await first
        assert call.aborted_s is None
        tasks[2].cancel()
        async with asyncio.timeout(1):
            while call.aborted_s is None:
                await asyncio.sleep(0.001)
        await up.settled()


async def test_a_short_answer_is_not_held_by_a_long_one(engine: FakeEngine) -> None:
    async with serve([engine.url], batching={"window_ms": 20}) as up:
        engine.script(COMPLETIONS, Script(delay_s=1.5))
        long = asyncio.create_task(up.completion("long", temperature=0, max_tokens=2000))
        while not engine.asked(COMPLETIONS):
            await asyncio.sleep(0.001)
        await up.completion("short", temperature=0, max_tokens=5)
        assert not long.done()
        await long


async def test_usage_is_each_clients_own_and_adds_up_to_the_engines(engine: FakeEngine) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        first = await busy(engine, up)
        before = engine.counters["prompt"]
        answers = await asyncio.gather(
            up.completion("word " * 10, temperature=0),
            up.completion("word " * 500, temperature=0),
        )
        usages = [answer.json()["usage"] for answer in answers]
        assert [usage["prompt_tokens"] for usage in usages] == [11, 501]
        other = (await first).json()["usage"]["prompt_tokens"]
        counted = engine.counters["prompt"] - before - other
        assert sum(usage["prompt_tokens"] for usage in usages) == counted
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)


async def test_token_ids_are_stripped_unless_asked_for(engine: FakeEngine) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        for asked in (None, True):
            fields = {} if asked is None else {"return_token_ids": asked}
            first = await busy(engine, up)
            answers = await asyncio.gather(*(up.completion(f"p{i}", temperature=0, **fields) for i in range(2)))
            await first
            for answer in answers:
                choice = answer.json()["choices"][0]
                assert (choice["token_ids"] is not None) == bool(asked)
                assert (choice["prompt_token_ids"] is not None) == bool(asked)


# -- whose requests may share ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "two", "merge"),
    [
        ({}, {}, True),  # one shared cache, so one shared call too
        ({"group": "a"}, {"group": "a"}, True),
        ({"group": "a"}, {"group": "b"}, False),
        ({"group": "a"}, {}, False),
        ({"priority": 1}, {"priority": 1}, True),
        ({"priority": 1}, {"priority": 2}, False),
        ({"prompt_tokens_details": True}, {}, False),  # it would get the details of its neighbour's prompt
    ],
    ids=str,
)
async def test_keys_share_a_call_only_within_one_salt_group_and_priority(
    engine: FakeEngine, tmp_path: Path, one: dict[str, Any], two: dict[str, Any], merge: bool
) -> None:
    headers = keys_file(tmp_path / "keys.json", one=one, two=two, busy={})
    auth = {"disabled": False, "keys_file": str(tmp_path / "keys.json")}
    batching = {"window_ms": 100}
    async with serve([engine.url], auth=auth, batching=batching, policy={"engine_priority": True}) as up:
        engine.script("/v1/chat/completions", Script(delay_s=0.3))
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "keep busy"}]}
        first = asyncio.create_task(up.client.post("/v1/chat/completions", json=chat, headers=headers["busy"]))
        while not engine.asked("/v1/chat/completions"):
            await asyncio.sleep(0.001)
        body = {"model": MODEL, "prompt": "p", "temperature": 0}
        answers = await asyncio.gather(
            *(up.client.post(COMPLETIONS, json=body, headers=headers[name]) for name in ("one", "two"))
        )
        await first
        assert {answer.status_code for answer in answers} == {200}
        sent = engine.asked(COMPLETIONS)
        assert len(sent) == (1 if merge else 2)
        assert {seen.json.get("cache_salt") for seen in sent} == {one.get("group"), two.get("group")}


# -- embeddings --------------------------------------------------------------------------------------------------------

EMBEDDINGS = "/v1/embeddings"


async def embed(up: Running, value: Any, **fields: Any) -> httpx.Response:
    return await up.client.post(EMBEDDINGS, json={"model": MODEL, "input": value, **fields})


async def test_embeddings_of_token_ids_merge_and_are_accounted_exactly(engine: FakeEngine) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        first = await busy(engine, up)
        answers = await asyncio.gather(embed(up, [1, 2, 3]), embed(up, [[4, 5], [6]]), embed(up, [7]))
        await first
        assert [seen.json["input"] for seen in engine.asked(EMBEDDINGS)] == [[[1, 2, 3], [4, 5], [6], [7]]]
        assert [answer.json()["usage"]["prompt_tokens"] for answer in answers] == [3, 3, 1]
        for value, answer in zip(([1, 2, 3], [[4, 5], [6]], [7]), answers, strict=True):
            assert comparable(answer) == comparable(await embed(up, value))


async def test_embeddings_of_text_go_alone_since_an_engine_tells_only_a_lists_total(engine: FakeEngine) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        first = await busy(engine, up)
        answers = await asyncio.gather(*(embed(up, f"text {i}") for i in range(3)))
        await first
        assert {answer.status_code for answer in answers} == {200}
        assert len(engine.asked(EMBEDDINGS)) == 3


async def test_an_engine_that_adds_tokens_to_ids_gets_embeddings_alone(engine: FakeEngine) -> None:
    async with serve([engine.url], **LONG_WINDOW) as up:
        engine.script(EMBEDDINGS, Script(extra_usage=2))
        first = await busy(engine, up)
        answers = await asyncio.gather(embed(up, [1, 2, 3]), embed(up, [4]))
        await first
        assert [answer.json()["usage"]["prompt_tokens"] for answer in answers] == [3, 1]
        assert len(engine.asked(EMBEDDINGS)) == 1 + 2


# -- the property: merged or not, nobody can tell ----------------------------------------------------------------------

TEXT = st.sampled_from(["hello there", "a", "你好，世界", "def f(x): return x", "x " * 40, "", f"bad {POISON}"])
IDS = st.lists(st.integers(0, 49_999), min_size=1, max_size=6)
PROMPT = st.one_of(TEXT, IDS, st.lists(TEXT, min_size=1, max_size=3), st.lists(IDS, min_size=1, max_size=3))
REQUEST = st.fixed_dictionaries(
    {"prompt": PROMPT, "temperature": st.sampled_from([0, 0.7]), "max_tokens": st.sampled_from([1, 3, 200])},
    optional={
        "n": st.sampled_from([1, 2, 3]),
        "logprobs": st.just(2),
        "return_token_ids": st.booleans(),
        "stop": st.just(["zz"]),
    },
).map(lambda request: request if request["temperature"] == 0 else {**request, "seed": 11})


async def _mix(requests: list[dict[str, Any]]) -> None:
    async with FakeEngine(service_s=0.01) as engine, serve([engine.url], batching={"coalesce": False}) as up:
        first = await busy(engine, up, 0.03)
        merged = await asyncio.gather(*(up.completion(**request) for request in requests))
        await first
        await up.settled()
        async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as direct:
            for request, answer in zip(requests, merged, strict=True):
                alone = await direct.post(COMPLETIONS, json={"model": MODEL, **request})
                assert comparable(answer) == comparable(alone), request
        listed = sum(
            len(seen.json["prompt"]) > 1 for seen in engine.asked(COMPLETIONS) if seen.json.get("return_token_ids")
        )
        MERGES.append(listed)


MERGES: list[int] = []


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(REQUEST, min_size=1, max_size=14))
def test_for_any_mix_each_answer_is_what_its_client_would_have_got_alone(requests: list[dict[str, Any]]) -> None:
    asyncio.run(_mix(requests))


def test_the_mixes_above_did_merge() -> None:
    assert sum(MERGES) > 5, "the property held because nothing was merged"
