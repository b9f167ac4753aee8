"""What clients may send and what they get: fields, framing, headers, errors, statuses, over real sockets."""

import asyncio
import contextlib
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from gateway.keys import new_key
from tests.fakes.engine import MODEL, POISON, FakeEngine, Script
from tests.wire.conftest import Running, renewed, serve, until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}]},
    COMPLETIONS: {"model": MODEL, "prompt": "hello there"},
    EMBEDDINGS: {"model": MODEL, "input": "hello there"},
    RESPONSES: {"model": MODEL, "input": "hello there"},
    MESSAGES: {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 16},
}
EVERY_ROUTE = pytest.mark.parametrize("path", list(BODIES))
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def up(shared: tuple[FakeEngine, Running]) -> AsyncIterator[Running]:
    async for running in renewed(shared):
        yield running


@pytest.fixture
def engine(up: Running, shared: tuple[FakeEngine, Running]) -> FakeEngine:
    return shared[0]


def request_bytes(body: bytes | dict[str, Any], path: str = COMPLETIONS, **headers: str) -> bytes:
    """A POST as a client would write it; `headers` replace the usual ones, "" leaves one out."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"host": "gateway", "content-type": "application/json", "content-length": str(len(data))}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items() if value), "", ""]
    return "\r\n".join(lines).encode() + data


@contextlib.asynccontextmanager
async def connected(up: Running) -> Any:
    reader, writer = await asyncio.open_connection(*up.url.removeprefix("http://").split(":"))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one answer with a Content-Length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def raw(up: Running, data: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Send bytes as they are; the answer must be JSON, and the only one."""
    async with connected(up) as (reader, writer), asyncio.timeout(10):
        writer.write(data)
        status, headers, body = await read_answer(reader)
        assert headers["content-type"] == "application/json", body
        if headers.get("connection") == "close":
            assert await reader.read() == b"", "something came after a final answer"
        return status, headers, json.loads(body)


def envelope(document: dict[str, Any]) -> dict[str, Any]:
    """The error object, checked to be in the one shape."""
    error = document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return dict(error)


# -- framing -----------------------------------------------------------------------------------------------------------

SMALL = b'{"model":"fake-8b","prompt":"hello"}'


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(
            request_bytes(b"5\r\nhello\r\n0\r\n\r\n", transfer_encoding="chunked"), id="content-length beside chunked"
        ),
        pytest.param(
            request_bytes(SMALL).replace(b"content-length", b"content-length: 3\r\ncontent-length"),
            id="two content-lengths",
        ),
        pytest.param(request_bytes(SMALL, content_length="-5"), id="negative length"),
        pytest.param(request_bytes(SMALL, content_length="0x20"), id="hexadecimal length"),
        pytest.param(request_bytes(SMALL, content_length="99999999999999999999999"), id="length beyond 64 bits"),
        pytest.param(request_bytes(SMALL, content_length="", transfer_encoding="xchunked"), id="unknown coding"),
        pytest.param(
            request_bytes(SMALL, content_length="", transfer_encoding="chunked, identity"), id="chunked not last"
        ),
        pytest.param(
            request_bytes(b"zz\r\nhello\r\n0\r\n\r\n", content_length="", transfer_encoding="chunked"),
            id="bad chunk size",
        ),
        pytest.param(b"GET / HTTP/9.9\r\n\r\n", id="unknown version"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="a TLS hello"),
        pytest.param(b"{}\r\n\r\n", id="no request line"),
        pytest.param(b"POST /v1/completions HTTP/1.1\r\nhost : gateway\r\n\r\n", id="space before the colon"),
        pytest.param(b"POST /v1/completions HTTP/1.1\r\nx-a: 1\r\n folded\r\n\r\n", id="folded header"),
        pytest.param(b"POST /v1/completions HTTP/1.1\r\nx-a: 1\x00\r\n\r\n", id="NUL in a header"),
        pytest.param(b"POST /v1/\xff HTTP/1.1\r\nhost: gateway\r\n\r\n", id="path that is no ASCII"),
        pytest.param(b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com\r\n\r\n", id="CONNECT"),
    ],
)
async def test_framing_that_is_broken_or_ambiguous_is_400_json_and_the_end_of_the_connection(
    data: bytes, up: Running, engine: FakeEngine
) -> None:
    status, headers, document = await raw(up, data)
    assert status == 400
    assert headers["connection"] == "close"
    assert envelope(document)["code"] == "invalid_http"
    assert not engine.asked(COMPLETIONS)


async def test_a_chunked_body_is_a_body(up: Running, engine: FakeEngine) -> None:
    chunks = b"".join(b"%x\r\n%c\r\n" % (1, byte) for byte in SMALL) + b"0\r\n\r\n"
    status, _, _ = await raw(up, request_bytes(chunks, content_length="", transfer_encoding="chunked"))
    assert status == 200
    assert engine.asked(COMPLETIONS)[0].raw == SMALL


@pytest.mark.parametrize("head", [b"POST /v1/completions HTTP/1.1\r\nx-a: ", b"GET /", b"GET / HTTP/1.1\r\nx-"])
async def test_a_head_beyond_the_limit_is_431_and_is_not_buffered(head: bytes, up: Running) -> None:
    status, headers, document = await raw(up, head + b"a" * 2**20)
    assert status == 431
    assert headers["connection"] == "close"
    assert envelope(document)["code"] == "headers_too_large"


async def test_many_small_headers_beyond_the_limit_are_431(up: Running) -> None:
    status, _, _ = await raw(up, b"GET / HTTP/1.1\r\n" + b"x-a: b\r\n" * 100_000)
    assert status == 431


async def test_a_trailer_is_bounded_and_never_a_header(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"body_s": 5}) as up:
        chunked = request_bytes(
            b"%x\r\n%s\r\n0\r\n" % (len(SMALL), SMALL), content_length="", transfer_encoding="chunked"
        )
        # Were it a header, this deadline would be refused with 400.
        status, _, _ = await raw(up, chunked + b"x-request-timeout-s: never\r\n\r\n")
        assert status == 200
        status, _, document = await raw(up, chunked + b"x-a: " + b"a" * 2**20)
        assert status == 431, document
        assert len(engine.asked(COMPLETIONS)) == 1
        await up.settled()


@pytest.mark.parametrize("begun", [b"POST /v1/completions HTTP/1.1\r\nhost: gate", b"P"])
async def test_a_head_that_never_ends_is_408_in_its_time(begun: bytes, engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"head_s": 0.2}) as up:
        status, headers, document = await raw(up, begun)
        assert status == 408
        assert headers["connection"] == "close"
        assert envelope(document)["code"] == "request_timeout"


async def test_the_head_of_a_second_request_has_its_time_too(engine: FakeEngine) -> None:
    async with (
        serve([engine.url], timeouts={"head_s": 0.2}) as up,
        connected(up) as (reader, writer),
        asyncio.timeout(10),
    ):
        writer.write(request_bytes(SMALL))
        assert (await read_answer(reader))[0] == 200
        await asyncio.sleep(0.3)  # an idle connection between requests is no slow head
        writer.write(b"POST /v1/com")
        assert (await read_answer(reader))[0] == 408


async def test_a_connection_that_says_nothing_is_closed_in_its_time(engine: FakeEngine) -> None:
    async with serve([engine.url], timeouts={"head_s": 0.2}) as up, connected(up) as (reader, _), asyncio.timeout(10):
        assert await reader.read() == b""


async def test_a_pipelined_request_does_not_disturb_the_one_being_answered(up: Running, engine: FakeEngine) -> None:
    engine.script(COMPLETIONS, Script(delay_s=0.2))
    async with connected(up) as (reader, writer), asyncio.timeout(10):
        writer.write(request_bytes(SMALL) + request_bytes(SMALL) + b"\x00 garbage")
        status, headers, _ = await read_answer(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await reader.read() == b""
    assert len(engine.asked(COMPLETIONS)) == 1


async def test_an_upgrade_offer_is_declined_by_answering(up: Running, engine: FakeEngine) -> None:
    """Java's HTTP client offers h2c on every first request."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    async with connected(up) as (reader, writer), asyncio.timeout(10):
        for count in (1, 2):
            writer.write(request_bytes(SMALL, **offer))
            assert (await read_answer(reader))[0] == 200
            assert len(engine.asked(COMPLETIONS)) == count


# -- fields (A2, A10) --------------------------------------------------------------------------------------------------

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


# -- over-long prompts (A1) --------------------------------------------------------------------------------------------


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


# -- errors (A4) -------------------------------------------------------------------------------------------------------


def official(up: Running, key: str = "sk-none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{up.url}/v1", api_key=key, max_retries=0, http_client=up.client)


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


# -- statuses (A5) -----------------------------------------------------------------------------------------------------

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


# -- token ids (A11) ---------------------------------------------------------------------------------------------------


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


# -- routes and model names (A12) --------------------------------------------------------------------------------------


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


# -- headers (A14) -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["identity", "gzip", "br;q=1.0, gzip;q=0.5", ""])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_compressed_engine_answer_is_whole_and_its_length_agrees(
    coding: str, accept: str, up: Running, engine: FakeEngine
) -> None:
    plain = json.dumps({"object": "chat.completion", "choices": [{"message": {"content": "x" * 2000}}]}).encode()
    packed = gzip.compress(plain) if coding == "gzip" else zlib.compress(plain)
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    engine.script(CHAT, Script(body=packed, headers=headers))
    status, got, document = await raw(up, request_bytes(BODIES[CHAT], CHAT, accept_encoding=accept))
    assert status == 200
    assert document == json.loads(plain)
    assert int(got["content-length"]) == len(plain)
    assert "content-encoding" not in got
    assert engine.asked(CHAT)[0].headers["Accept-Encoding"] == "identity"


async def test_an_answer_that_claims_a_coding_it_has_not_is_502(up: Running, engine: FakeEngine) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    engine.script(CHAT, Script(body=b'{"object": "chat.completion"}', headers=headers))
    answer = await up.chat()
    assert answer.status_code == 502
    assert envelope(answer.json())["code"] == "engine_failed"


async def test_of_a_clients_headers_none_reaches_the_engine(up: Running, engine: FakeEngine) -> None:
    """An allow-list: hop-by-hop ones, those that Connection names, credentials and inventions alike stay here."""
    sent = {
        "Connection": "keep-alive, X-Foo",
        "X-Foo": "canary",
        "TE": "trailers",
        "Keep-Alive": "timeout=5, canary",
        "Proxy-Authorization": "Basic canary",
        "Proxy-Connection": "canary",
        "Authorization": "Bearer canary",
        "X-Api-Key": "",
        "Cookie": "canary=1",
        "X-Data-Parallel-Rank": "7",
        "X-Forwarded-For": "canary",
        "Forwarded": "for=canary",
        "User-Agent": "canary",
        "Accept": "canary/canary",
        "Accept-Language": "canary",
        "Origin": "http://canary",
        "OpenAI-Organization": "canary",
        "X-Request-Timeout-S": "60",
    }
    status, _, _ = await raw(up, request_bytes(BODIES[CHAT], CHAT, **sent))
    assert status == 200
    got = {name.lower(): value for name, value in engine.asked(CHAT)[0].headers.items()}
    assert not [value for value in got.values() if "canary" in value]
    assert set(got) <= {
        "host", "accept", "accept-encoding", "user-agent", "content-type", "content-length", "x-request-id",
    }  # fmt: skip
    assert got["host"] == engine.url.removeprefix("http://")


async def test_of_an_engines_headers_only_retry_after_reaches_the_client(up: Running, engine: FakeEngine) -> None:
    theirs = {"Server": "canary", "Set-Cookie": "canary=1", "X-Internal": "canary", "Connection": "close"}
    engine.script(CHAT, Script(body=b'{"object": "chat.completion"}', headers=theirs))
    status, headers, _ = await raw(up, request_bytes(BODIES[CHAT], CHAT))
    assert status == 200
    assert set(headers) == {"date", "content-type", "content-length", "x-request-id"}
    assert (await up.chat()).status_code == 200


@pytest.mark.parametrize(
    "sent",
    ["a\tb", "two words", "x" * 65, "-a", "../etc", "a\x80", "é", "", "a;b", 'a"b', "<script>"],
)
async def test_a_request_id_that_is_not_fit_is_replaced(sent: str, up: Running, engine: FakeEngine) -> None:
    async with connected(up) as (reader, writer), asyncio.timeout(10):
        head = b"x-request-id: " + sent.encode("latin-1") + b"\r\nhost:"
        writer.write(request_bytes(BODIES[CHAT], CHAT).replace(b"host:", head))
        status, headers, _ = await read_answer(reader)
    assert status == 200
    assert len(headers["x-request-id"]) == 32 and headers["x-request-id"].isalnum()
    assert engine.asked(CHAT)[0].headers["x-request-id"] == headers["x-request-id"]


async def test_a_fit_request_id_comes_back_on_every_answer(up: Running) -> None:
    for path, body in ((CHAT, BODIES[CHAT]), (CHAT, {}), ("/v1/nothing", {})):
        answer = await up.client.post(path, json=body, headers={"X-Request-Id": "my-id_1.2"})
        assert answer.headers["x-request-id"] == "my-id_1.2"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9", "soon", "", "1 2"])
async def test_a_deadline_that_is_none_is_400(value: str, up: Running, engine: FakeEngine) -> None:
    answer = await up.client.post(CHAT, json=BODIES[CHAT], headers={"X-Request-Timeout-S": value})
    assert answer.status_code == 400
    assert "X-Request-Timeout-S" in envelope(answer.json())["message"]
    assert not engine.asked(CHAT)
