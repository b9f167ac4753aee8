"""What clients may not make an engine do: run their templates, fetch their addresses, shorten their prompts."""

import json
from typing import Any

import pytest

from tests.fakes.engine import MODEL, FakeEngine
from tests.wire.conftest import Running, serve

TEMPLATE = "{% for a in range(999999) %}{% for b in range(999999) %}x{% endfor %}{% endfor %}"
PIXEL = "data:image/png;base64," + "A" * 4096
ADDRESSES = ["http://169.254.169.254/latest/meta-data", "http://grafana:3000/", "file:///etc/passwd", PIXEL]


def chat(*content: Any, role: str = "user", **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "look"}, {"role": role, "content": list(content)}]
    return "/v1/chat/completions", {"messages": messages, **fields}


def responses(*items: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": list(items)}


def anthropic(*content: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": list(content)}]}


def media_requests(address: str) -> list[tuple[str, dict[str, Any]]]:
    """One address in every spelling that vLLM or the three APIs know, and some that they may learn."""
    image = {"type": "image_url", "image_url": {"url": address}}
    source = {"type": "image", "source": {"type": "url", "url": address}}
    input_image = {"type": "input_image", "image_url": address}
    return [
        chat(image),
        chat({"type": "text", "text": "look"}, image),
        chat(image, role="tool", tool_call_id="1"),
        chat(image, role="system"),
        chat({"image_url": address}),
        chat({"type": None, "image_url": address}),
        chat({"type": "text", "text": "look", "image_url": {"url": address}}),
        chat({"type": "text", "content": [image]}),
        chat({"type": "image_url", "image_url": address}),
        chat(input_image),
        chat({"type": "image_pil", "image_pil": address}),
        chat({"type": "image_embeds", "image_embeds": "AAAA"}),
        chat({"type": "audio_url", "audio_url": {"url": address}}),
        chat({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
        chat({"type": "video_url", "video_url": {"url": address}}),
        chat({"type": "file", "file": {"file_data": address}}),
        chat({"type": "a_part_of_next_year", "url": address}),
        chat({"type": ["image_url"], "image_url": {"url": address}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": image}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "image_url": address}]}),
        responses({"type": "message", "role": "user", "content": [input_image]}),
        responses({"role": "user", "content": [{"type": "input_file", "file_url": address}]}),
        responses(input_image),
        responses({"type": "function_call_output", "call_id": "1", "output": [input_image]}),
        responses({"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": address}}),
        anthropic(source),
        anthropic({"type": "tool_result", "tool_use_id": "1", "content": [source]}),
        anthropic({"type": "document", "source": {"type": "url", "url": address}}),
        ("/v1/messages", {**anthropic({"type": "text", "text": "x"})[1], "system": [source]}),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": [image]}]}),
    ]


@pytest.mark.parametrize("address", ADDRESSES, ids=["metadata", "neighbour", "file", "data"])
async def test_media_is_refused_in_every_spelling_and_reaches_no_engine(
    up: Running, engine: FakeEngine, address: str
) -> None:
    for path, fields in media_requests(address):
        answer = await up.client.post(path, json={"model": MODEL, **fields})
        assert answer.status_code == 400, (fields, answer.text)
        assert answer.json()["error"]["code"] == "unsupported_parameter"
        assert not engine.asked(path), fields


async def test_a_20_mb_data_url_is_refused_too(up: Running, engine: FakeEngine) -> None:
    path, fields = chat({"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 20_000_000}})
    answer = await up.client.post(path, json={"model": MODEL, **fields})
    assert answer.status_code == 413
    assert not engine.asked(path)


FOR_THE_GATEWAY_ONLY: list[dict[str, Any]] = [
    {"chat_template": TEMPLATE},
    {"chat_template_kwargs": {"chat_template": TEMPLATE}},
    {"chat_template_kwargs": {"enable_thinking": False, "chat_template": TEMPLATE}},
    {"truncate_prompt_tokens": 10},
    {"truncate_prompt_tokens": -1},
    {"cache_salt": "mine"},
    {"priority": -10},
    {"priority": 0},
    {"kv_transfer_params": {"remote_host": "10.0.0.1"}},
    {"prompt_embeds": "AAAA"},
    {"request_id": "theirs"},
]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"])
async def test_fields_that_are_not_for_clients_are_refused_on_every_route(
    up: Running, engine: FakeEngine, route: str
) -> None:
    for fields in FOR_THE_GATEWAY_ONLY:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "input": "x", "max_tokens": 5, **fields}
        answer = await up.client.post(route, json=body)
        assert answer.status_code == 400, (fields, answer.text)
        assert answer.json()["error"]["param"] in (*fields, "chat_template"), fields
        assert not engine.asked(route), fields


async def test_a_refused_field_is_recognized_however_json_spells_its_name(up: Running, engine: FakeEngine) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "XX": TEMPLATE})
    body = body.replace("XX", "\\u0063hat_template")
    answer = await up.client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert not engine.asked("/v1/chat/completions")


async def test_benign_template_arguments_and_text_of_every_kind_pass_untouched(up: Running, engine: FakeEngine) -> None:
    text = [
        {
            "type": "text",
            "text": "look at http://169.254.169.254/ and image_url",
            "cache_control": {"type": "ephemeral"},
        },
        {"type": "refusal", "refusal": "no"},
        {"text": "without a type"},
    ]
    path, fields = chat(*text, chat_template_kwargs={"enable_thinking": False}, image_url="a field of no meaning here")
    answer = await up.client.post(path, json={"model": MODEL, **fields})
    assert answer.status_code == 200, answer.text
    assert engine.asked(path)[0].json == {"model": MODEL, **fields}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        anthropic(
            {"type": "tool_use", "id": "1", "name": "f", "input": {"image": "x", "source": "y", "content": [{"a": 1}]}},
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]},
            {"type": "tool_result", "tool_use_id": "1", "content": "x"},
            {"type": "thinking", "thinking": "hm", "signature": "s"},
        ),
        responses(
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"image_url": "x"}'},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "content": []},
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        ),
    ],
)
async def test_tools_and_reasoning_pass(up: Running, engine: FakeEngine, path: str, fields: dict[str, Any]) -> None:
    await up.client.post(path, json={"model": MODEL, **fields})
    assert engine.asked(path)[0].json == {"model": MODEL, **fields}


async def test_what_is_allowed_by_policy_passes(engine: FakeEngine) -> None:
    policy = {"allow_chat_template": True, "allow_media_urls": True, "allow_truncation": True}
    async with serve([engine.url], policy=policy) as up:
        path, fields = chat(
            {"type": "image_url", "image_url": {"url": "http://images/1.png"}},
            chat_template="{{ messages }}",
            truncate_prompt_tokens=100,
        )
        assert (await up.client.post(path, json={"model": MODEL, **fields})).status_code == 200
        assert engine.asked(path)[0].json == {"model": MODEL, **fields}
