"""What clients may ask: fields, prompts and names, passed on as they are."""

import json
from typing import Any

import pytest

from tests.fakes.engine import MODEL, FakeEngine
from tests.wire.conftest import Running, renewing, serve
from tests.wire.talking import (
    BODIES,
    CHAT,
    COMPLETIONS,
    EVERY_ROUTE,
    envelope,
    official,
)

up, engine = renewing()
pytestmark = pytest.mark.asyncio(loop_scope="module")


# -- fields ------------------------------------------------------------------------------------------------------------

UNKNOWN_FIELDS = [
    '"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.10',
    '"chat_template_kwargs": {"enable_thinking": false, "n": [1, 2.50, null]}',
    '"structured_outputs": {"json": {"type": "object", "properties": {"a": {"enum": ["x", 1, 1.0, null]}}}}',
    '"max_completion_tokens": 7',
    '"future_field": {"deep": [[[{"a": {}}]]], "big": 123456789012345678901234567890, "float": 1e2, "tiny": 1E-400}',
    '"user": "\\u00e9\\ud83c\\udf89 漢字 \u2028 \\/ \\u0000"',
    '"seed": -9223372036854775808',
    '"metadata": {"cache_salt": "mine", "model": "other"}',
    '"stop": ["\\n\\n", "}", "\\"", "]"]',
]


@pytest.mark.parametrize("fields", UNKNOWN_FIELDS)
@EVERY_ROUTE
async def test_fields_the_gateway_does_not_know_reach_the_engine_byte_for_byte(
    path: str, fields: str, up: Running, engine: FakeEngine
) -> None:
    body = (json.dumps(BODIES[path], indent=1)[:-1] + f", {fields}\n}}\r\n").encode()
    answer = await up.client.post(path, content=body, headers={"Content-Type": "application/json; charset=utf-8"})
    assert answer.status_code == 200, answer.text
    assert [seen.raw for seen in engine.asked(path)] == [body]


@pytest.mark.parametrize("fields", UNKNOWN_FIELDS)
async def test_they_keep_their_bytes_also_where_the_gateway_sets_a_field(fields: str, engine: FakeEngine) -> None:
    async with serve([engine.url], aliases={"gpt-x": MODEL}) as up:
        body = (
            f'{{"messages":[{{"role":"user","content":"hi"}}], "model": "gpt-x", {fields}, "stream": true }}'.encode()
        )
        answer = await up.client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200, answer.text
        added = b', "stream": true ,"stream_options":{"include_usage":true}}'
        expected = body.replace(b' "gpt-x"', f'"{MODEL}"'.encode()).replace(b', "stream": true }', added)
        assert [seen.raw for seen in engine.asked(CHAT)] == [expected]


async def test_a_chat_stays_a_chat(up: Running, engine: FakeEngine) -> None:
    """Rendering its template here and asking for a completion would put a second beginning-of-text before it."""
    messages = [{"role": "system", "content": "  spaces stay  "}, {"role": "user", "content": "x"}] * 3
    answer = await up.client.post(CHAT, json={"model": MODEL, "messages": messages})
    assert answer.status_code == 200
    assert engine.asked(CHAT)[0].json["messages"] == messages
    assert [seen.path for seen in engine.seen] == [CHAT]


# -- over-long prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "max_tokens", "status"),
    [
        pytest.param(9000, 16, 400, id="prompt beyond the window"),
        pytest.param(8000, 1000, 400, id="prompt and answer beyond the window"),
        pytest.param(8191 - 16, 16, 200, id="exactly fitting"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_over_long_prompt_is_one_clean_400(
    words: int, max_tokens: int, status: int, stream: bool, up: Running, engine: FakeEngine
) -> None:
    answer = await up.completion("word " * words, max_tokens=max_tokens, stream=stream)
    assert answer.status_code == status
    assert len(engine.asked(COMPLETIONS)) == 1
    assert await up.metric("gateway_requests_total", route=COMPLETIONS, status=str(status)) == 1
    assert await up.metric("gateway_upstream_failures_total") == 0
    if status == 400:
        error = envelope(answer.json())
        assert "maximum context length is 8192" in error["message"]
        assert error["param"] == "input_tokens"


# -- token ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [([128000, 9906], 1), ([[128000], [9906]], 2), (["a", "b", "c"], 3), ("a", 1), ([[1, 2, 3]], 1)],
)
async def test_token_ids_are_one_prompt_and_lists_of_them_several(
    prompt: Any, choices: int, up: Running, engine: FakeEngine
) -> None:
    answer = await up.completion(prompt, max_tokens=2)
    assert answer.status_code == 200
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(choices))
    assert engine.asked(COMPLETIONS)[0].json["prompt"] == prompt


@pytest.mark.parametrize(
    "prompt",
    [[], [-1], [5279552648203111001], [2**64], ["a", 1], [1, "a"], [[]], [[1], []], [1.5], [True], None, {}, 7],
)
async def test_other_prompts_are_400_and_the_engine_answers_on(prompt: Any, up: Running, engine: FakeEngine) -> None:
    answer = await up.completion(prompt)
    assert answer.status_code == 400
    assert envelope(answer.json())["param"] == "prompt"
    assert not engine.asked(COMPLETIONS)
    assert (await up.completion("fine")).status_code == 200


# -- routes and model names --------------------------------------------------------------------------------------------


@EVERY_ROUTE
@pytest.mark.parametrize("change", [lambda path: path + "/", lambda path: "/" + path, lambda path: path + "//"])
async def test_a_slash_too_many_is_a_404_and_never_a_redirect(
    path: str, change: Any, up: Running, engine: FakeEngine
) -> None:
    headers = {"X-Forwarded-Proto": "https", "Authorization": "Bearer sk-canary"}
    answer = await up.client.post(f"{up.url}{change(path)}", json=BODIES[path], headers=headers)
    assert answer.status_code == 404
    assert "location" not in answer.headers
    envelope(answer.json())
    assert not engine.asked(path) and not engine.asked(change(path))


async def test_models_are_listed_by_name_and_alias_and_each_listed_name_works() -> None:
    served = ("org/model-8b", "plain")
    async with FakeEngine(models=served) as engine, serve([engine.url], aliases={"gpt-4o": served[0]}) as up:
        listed = (await up.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert {entry["id"] for entry in listed["data"]} == {*served, "gpt-4o"}
        assert "/models/x" not in json.dumps(listed), "an engine's path is nobody's business"
        for entry in listed["data"]:
            one = await up.client.get(f"/v1/models/{entry['id']}")
            assert one.json() == entry
            answer = await up.client.post(CHAT, json={**BODIES[CHAT], "model": entry["id"]})
            assert answer.status_code == 200
        assert [seen.json["model"] for seen in engine.asked(CHAT)] == [
            {"gpt-4o": served[0]}.get(entry["id"], entry["id"]) for entry in listed["data"]
        ]
        for unknown in ("org", "org/", "model-8b", "ORG/model-8b", "org%2Fmodel-9b"):
            answer = await up.client.get(f"/v1/models/{unknown}")
            assert answer.status_code == 404
            assert envelope(answer.json())["code"] == "model_not_found"
        assert (await up.client.get("/v1/models/org%2Fmodel-8b")).status_code == 200
        client = official(up)
        assert {model.id async for model in client.models.list()} == {*served, "gpt-4o"}


async def test_an_unknown_model_is_404_model_not_found_and_no_model_is_400(up: Running, engine: FakeEngine) -> None:
    unknown = await up.client.post(CHAT, json={**BODIES[CHAT], "model": "/models/x"})
    assert unknown.status_code == 404
    assert envelope(unknown.json())["code"] == "model_not_found"
    assert envelope(unknown.json())["param"] == "model"
    missing = await up.client.post(CHAT, json={"messages": BODIES[CHAT]["messages"]})
    assert missing.status_code == 400
    assert envelope(missing.json())["param"] == "model"
    assert not engine.asked(CHAT)
