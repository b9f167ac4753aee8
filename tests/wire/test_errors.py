"""Errors: one shape from everywhere, the right status, the right class in the official client."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.keys import new_key
from tests.fakes.engine import MODEL, POISON, FakeEngine, Script
from tests.wire.conftest import Running, renewing, serve, until
from tests.wire.talking import (
    BODIES,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    EVERY_ROUTE,
    MESSAGES,
    RESPONSES,
    envelope,
    official,
)

up, engine = renewing()
pytestmark = pytest.mark.asyncio(loop_scope="module")


# -- errors ------------------------------------------------------------------------------------------------------------


@EVERY_ROUTE
@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"{", 400, id="broken JSON"),
        pytest.param(b"[]", 400, id="no object"),
        pytest.param(b'{"messages": {}, "prompt": 1, "input": 7, "model": "fake-8b"}', 400, id="wrong types"),
        pytest.param(b'{"messages": [{"role": "user"}], "prompt": "x", "input": "x"}', 400, id="no model"),
        pytest.param(
            b'{"messages": [{"role": "user"}], "prompt": "x", "input": "x", "model": "none"}', 404, id="unknown model"
        ),
    ],
)
async def test_a_bad_body_is_refused_in_the_one_shape_without_the_engine(
    path: str, body: bytes, status: int, up: Running, engine: FakeEngine
) -> None:
    if path == RESPONSES and b"{}" in body:
        body = body.replace(b"7", b"null")  # what else a response's input may be is the engine's to say
    elif path == EMBEDDINGS:
        body = body.replace(b'"messages": {}, ', b"")  # likewise what messages may be embedded
    answer = await up.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    envelope(answer.json())
    assert (answer.json().get("type") == "error") is (path == MESSAGES)
    assert not engine.asked(path)


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
async def test_another_content_type_is_415(content_type: str | None, up: Running) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    answer = await up.client.post(CHAT, content=json.dumps(BODIES[CHAT]).encode(), headers=headers)
    assert answer.status_code == 415
    assert envelope(answer.json())["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/", 404),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models/x", 405),
        ("GET", CHAT, 405),
        ("PUT", COMPLETIONS, 405),
        ("PATCH", EMBEDDINGS, 405),
        ("POST", "/healthz", 405),
    ],
)
async def test_unknown_routes_are_404_and_wrong_methods_405(
    method: str, path: str, status: int, up: Running, engine: FakeEngine
) -> None:
    answer = await up.client.request(method, path)
    assert answer.status_code == status, answer.text
    envelope(answer.json())
    assert ("allow" in answer.headers) is (status == 405)
    assert not [seen for seen in engine.seen if seen.path == path and seen.path != COMPLETIONS]


async def test_the_official_client_raises_the_right_class_with_its_message(engine: FakeEngine, tmp_path: Path) -> None:
    secret, digest = new_key()
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [{"name": "app1", "sha256": digest}]}))
    settings: dict[str, Any] = {
        "auth": {"disabled": False, "keys_file": str(tmp_path / "keys.json")},
        "limits": {"max_body_bytes": 4096},
        "timeouts": {"total_s": 0.5},
    }
    error = {"Content-Type": "application/json", "Retry-After": "7"}
    async with serve([engine.url], **settings) as up:

        async def ask(content: str = "x", model: str = MODEL, key: str = secret, **fields: Any) -> Any:
            client = official(up, key)
            return await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": content}], **fields
            )

        assert (await ask()).choices[0].message.content
        for make, kind, status in (
            (ask(temperature=0, n=99), openai.BadRequestError, 400),
            (ask(POISON), openai.BadRequestError, 400),
            (ask(key="sk-wrong"), openai.AuthenticationError, 401),
            (ask(model="none"), openai.NotFoundError, 404),
            (ask("x" * 5000), openai.APIStatusError, 413),
        ):
            with pytest.raises(kind) as caught:
                await make
            _check(caught.value, status)
        for status, kind in (
            (400, openai.BadRequestError),
            (403, openai.InternalServerError),  # the engine refuses the gateway, which is no fault of the client
            (404, openai.NotFoundError),
            (422, openai.UnprocessableEntityError),
            (429, openai.RateLimitError),
            (500, openai.InternalServerError),
            (503, openai.InternalServerError),
        ):
            engine.script(CHAT, Script(status=status, body=b'{"error":{"message":"it says why"}}', headers=error))
            with pytest.raises(kind) as caught:
                await ask()
            _check(caught.value, 502 if status == 403 else status)
            assert status == 403 or "it says why" in caught.value.message
            assert caught.value.response.headers.get("retry-after") == (None if status == 403 else "7")
        engine.script(CHAT, Script(hang=True))
        with pytest.raises(openai.InternalServerError) as caught:
            await ask()
        _check(caught.value, 504)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_every_refusal_of_the_gateways_own_has_the_dialects_shape(
    path: str, engine: FakeEngine, tmp_path: Path
) -> None:
    secret, digest = new_key()
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [{"name": "app1", "sha256": digest}]}))
    settings: dict[str, Any] = {
        "auth": {"disabled": False, "keys_file": str(tmp_path / "keys.json")},
        "limits": {"max_body_bytes": 1024},
        "admission": {"max_in_flight": 1, "max_queue_tokens": 0},
    }
    async with serve([engine.url], **settings) as up:
        key, wrong = {"Authorization": f"Bearer {secret}"}, {"x-api-key": "sk-wrong"}
        engine.script(path, Script(hang=True))
        hold = asyncio.create_task(up.client.post(path, json=BODIES[path], headers=key))
        await until(lambda: engine.asked(path))
        refusals = {
            401: await up.client.post(path, json=BODIES[path], headers=wrong),
            405: await up.client.get(path, headers=key),
            400: await up.client.post(path, json=BODIES[path], headers={**key, "X-Request-Timeout-S": "0"}),
            413: await up.client.post(path, json={**BODIES[path], "pad": "x" * 2000}, headers=key),
            415: await up.client.post(path, content=b"{}", headers=key),
            429: await up.client.post(path, json=BODIES[path], headers=key),
        }
        up.gateway.edge.draining = True
        refusals[503] = await up.client.post(path, json=BODIES[path], headers=key)
        hold.cancel()
        for status, answer in refusals.items():
            assert answer.status_code == status
            envelope(answer.json())
            assert (answer.json().get("type") == "error") is (path == MESSAGES), status
            assert ("retry-after" in answer.headers) is (status in (429, 503)), status
        assert len(engine.asked(path)) == 1
        await up.settled()


async def test_the_official_client_calls_an_overload_a_rate_limit(engine: FakeEngine) -> None:
    async with serve([engine.url], admission={"max_in_flight": 1, "max_queue_tokens": 0}) as up:
        engine.script(CHAT, Script(hang=True))
        hold = asyncio.create_task(up.chat())
        await until(lambda: engine.asked(CHAT))
        with pytest.raises(openai.RateLimitError) as caught:
            await official(up).chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        _check(caught.value, 429)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        hold.cancel()
        await up.settled()


def _check(error: openai.APIStatusError, status: int) -> None:
    assert error.status_code == status
    assert isinstance(error.body, dict) and error.body["message"] in error.message
    assert set(error.body) == {"message", "type", "param", "code"}


# What engines of several versions send; each must come out in the one shape with its message.
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "m", "type": "BadRequestError", "param": "p", "code": 400}}, "m"),
        ({"error": {"message": "m", "type": "BadRequestError"}}, "m"),
        ({"object": "error", "message": "m", "type": "BadRequestError", "param": None, "code": 400}, "m"),
        ({"error": "m"}, "m"),
        ({"detail": "m"}, "m"),
        ({"detail": [{"loc": ["body", "x"], "msg": "field required"}]}, "field required"),
        ({"type": "error", "error": {"type": "BadRequestError", "message": "m"}}, "m"),
        ({}, "the engine answered 400"),
        ({"error": None}, "the engine answered 400"),
        ({"error": {"message": None}}, "the engine answered 400"),
    ],
)
@EVERY_ROUTE
async def test_an_engines_error_of_any_shape_comes_out_in_the_one_shape(
    path: str, body: dict[str, Any], message: str, up: Running, engine: FakeEngine
) -> None:
    headers = {"Content-Type": "application/json"}
    engine.script(path, Script(status=400, body=json.dumps(body).encode(), headers=headers))
    answer = await up.client.post(path, json=BODIES[path])
    assert answer.status_code == 400
    assert message in envelope(answer.json())["message"]
    assert (answer.json().get("type") == "error") is (path == MESSAGES)


# -- statuses ----------------------------------------------------------------------------------------------------------

ERROR = b'{"error":{"message":"no","type":"t","param":null,"code":1}}'


@pytest.mark.parametrize(
    ("script", "status", "retry_after"),
    [
        (Script(status=400, body=ERROR), 400, None),
        (Script(status=404, body=ERROR), 404, None),
        (Script(status=422, body=ERROR), 422, None),
        (Script(status=429, body=ERROR, headers={"Retry-After": "7"}), 429, "7"),
        (Script(status=429, body=ERROR, headers={"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"}), 429, "Wed"),
        (Script(status=429, body=ERROR), 429, "1"),
        (Script(status=500, body=ERROR), 500, None),
        (Script(status=501, body=ERROR), 501, None),
        (Script(status=503, body=ERROR), 503, "1"),
        (Script(status=401, body=ERROR), 502, None),
        (Script(status=403, body=ERROR), 502, None),
        (Script(status=200, body=b""), 502, None),
        (Script(status=200, body=b"null"), 502, None),
        (Script(status=200, body=b"[]"), 502, None),
        (Script(status=200, body=b'{"choices": ['), 502, None),
        (Script(status=200, body=b"<html>ok</html>", headers={"Content-Type": "text/html"}), 502, None),
        (Script(status=200, body=ERROR), 502, None),
        (Script(status=200, body=b'{"object":"error","message":"no","code":400}'), 502, None),
        (Script(status=204), 502, None),
        (Script(status=301, body=b"{}", headers={"Location": "http://127.0.0.1:1/"}), 502, None),
        (Script(status=307, body=b"{}", headers={"Location": "http://127.0.0.1:1/"}), 502, None),
        (Script(status=500, body=b"Internal Server Error", headers={"Content-Type": "text/plain"}), 502, None),
        (Script(status=502, body=b"<html>bad gateway</html>", headers={"Content-Type": "text/html"}), 502, None),
        (Script(status=404, body=b"<html>no</html>"), 502, None),
        (Script(reset_before_answer=True), 502, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_status_is_kept_or_mapped_and_never_200(
    script: Script, status: int, retry_after: str | None, stream: bool, up: Running, engine: FakeEngine
) -> None:
    engine.script(CHAT, script)
    answer = await up.chat(stream=stream)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    envelope(answer.json())
    sent = answer.headers.get("retry-after")
    assert sent == retry_after or (retry_after == "Wed" and sent is not None and sent.startswith("Wed, 21 Oct"))
    assert len(engine.asked(CHAT)) == 1
    assert "127.0.0.1" not in answer.text


async def test_an_engine_that_refuses_connections_is_503_with_a_retry_after(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"reload_wait_s": 0.2}) as up:
        await engine.stop()
        answer = await up.chat()
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        envelope(answer.json())
        assert "127.0.0.1" not in answer.text
        await engine.start()
        await until(lambda: up.gateway.health.ready()[0])
        assert (await up.chat()).status_code == 200


async def test_a_body_cut_short_by_the_engine_is_502(up: Running) -> None:
    """An engine that promises more bytes than it sends, on a socket of our own."""
    replies = asyncio.Event()

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        json_head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
        if "post" in head and "chat" in head:
            replies.set()
            writer.write(json_head + b"100\r\n\r\n{}")
        elif "/v1/models" in head:
            body = json.dumps({"data": [{"id": MODEL}]}).encode()
            writer.write(json_head + b"%d\r\n\r\n%s" % (len(body), body))
        else:
            writer.write(json_head + b"2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    async with server, serve([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"]) as other:
        answer = await other.chat()
        assert replies.is_set()
        assert answer.status_code == 502
        assert envelope(answer.json())["code"] == "engine_failed"
