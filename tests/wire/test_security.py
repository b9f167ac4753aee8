"""The edge against those who try: routes, headers, browsers, tenants."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.engine import MODEL, FakeEngine
from tests.wire.conftest import Running, serve

KEY = "sk-canary-one"
BEARER = {"Authorization": f"Bearer {KEY}"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def keys_file(path: Path, **tenants: dict[str, Any]) -> Path:
    """A keys file; each tenant's key is `sk-canary-NAME` unless it brings its own."""
    entries = [
        {"name": name, "sha256": hashlib.sha256(fields.pop("key", f"sk-canary-{name}").encode()).hexdigest(), **fields}
        for name, fields in ((name, dict(fields)) for name, fields in tenants.items())
    ]
    path.write_text(json.dumps({"keys": entries}))
    return path


def lower(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def with_key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-canary-{name}"}


@asynccontextmanager
async def guarded(fake: FakeEngine, tmp_path: Path, **settings: Any) -> AsyncIterator[Running]:
    keys = keys_file(tmp_path / "keys.json", one={})
    async with serve([fake.url], **{"auth": {"disabled": False, "keys_file": keys}, **settings}) as up:
        yield up


async def raw(up: Running, request: bytes) -> tuple[int, bytes]:
    """Send bytes as they are; status and body of the first answer, 0 where the connection is just closed."""
    host, _, port = up.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    async with asyncio.timeout(10):
        head = b""
        while b"\r\n\r\n" not in head and (part := await reader.read(65536)):
            head += part
        head, _, body = head.partition(b"\r\n\r\n")
        length = next((int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x[:15] == b"content-length:"), 0)
        while len(body) < length and (part := await reader.read(65536)):
            body += part
    writer.close()
    return (int(head.split()[1]), body) if head else (0, b"")


def request(target: bytes, method: bytes = b"POST", key: bytes = b"", version: bytes = b"HTTP/1.1") -> bytes:
    body = json.dumps(CHAT).encode()
    authorization = b"Authorization: Bearer %s\r\n" % key if key else b""
    return (
        b"%s %s %s\r\nHost: gateway\r\nContent-Type: application/json\r\nConnection: close\r\n%s"
        b"Content-Length: %d\r\n\r\n%s"
    ) % (method, target, version, authorization, len(body), body)


ELSEWHERE = [
    "/",
    "/invocations",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/classify",
    "/load",
    "/ping",
    "/version",
    "/health",
    "/metrics",
    "/status",
    "/drain",
    "/reset_prefix_cache",
    "/sleep",
    "/wake_up",
    "/collective_rpc",
    "/server_info",
    "/start_profile",
    "/docs",
    "/redoc",
    "/v1",
    "/v1/",
    "/v1/chat",
    "/v1/audio/transcriptions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/completions/",
    "/v1/responses/resp_1",
    "/v1/responses/resp_1/cancel",
    "/v1/messages/count_tokens",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/inference/v1/generate",
    "/v2/embed",
    # the allowed routes in other spellings
    "//v1/chat/completions",
    "///v1/chat/completions",
    "/v1//chat/completions",
    "/./v1/chat/completions",
    "/v1/./chat/completions",
    "/v1/chat/completions/.",
    "/V1/chat/completions",
    "/v1/Chat/Completions",
    "/v1/chat/completions;x=1",
    "/v1/chat%2Fcompletions",
    "/v1/chat/completion%73",
    "/%76%31/chat/completions",
    "/v1/chat/completions%00",
    "/v1/chat/completions%20",
    "/v1/chat\\completions",
    # and on to others
    "/v1/../invocations",
    "/v1/chat/completions/../../../invocations",
    "/v1/%2e%2e/invocations",
    "/v1/%2E%2E%2Finvocations",
    "/v1/%252e%252e/invocations",
    "/v1/..%2finvocations",
    "/v1/models/../../invocations",
    "/healthz/../invocations",
    "/readyz/",
    "//invocations",
    "//169.254.169.254/latest",
    "http://gateway/invocations",
    "http://169.254.169.254/latest/meta-data",
    "HTTP://gateway//v1/chat/completions",
    "/invocations?x=/v1/chat/completions",
    "/invocations#/v1/chat/completions",
    "/v1/chat/completions%3Fx",
]


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_only_listed_routes_answer_the_rest_is_401_without_and_404_with_a_key_and_reaches_no_engine(
    engine: FakeEngine, tmp_path: Path, method: str
) -> None:
    async with guarded(engine, tmp_path) as up:
        probes = len(engine.seen)
        for target in ELSEWHERE:
            for key, expected in ((b"", 401), (KEY.encode(), 404)):
                status, body = await raw(up, request(target.encode(), method.encode(), key))
                assert status in (expected, 400, 405 if target.startswith("/v1/models/") else 404), (target, body)
                assert (status == 401) is (not key) or status == 400
                error = json.loads(body)["error"]
                assert error["type"] in ("invalid_request_error", "authentication_error"), target
                assert error["message"]
        assert len(engine.seen) == probes


NO_TARGETS = [
    b"*",
    b"",
    b"v1/chat/completions",
    b"/v1/chat/completions\xff",
    b"/\xc3\xa9",
    b"http://",
    b"//",
    b"\0",
    b"/ x",
]


async def test_targets_that_are_none_are_refused_in_json_or_cut_off(engine: FakeEngine, tmp_path: Path) -> None:
    async with guarded(engine, tmp_path) as up:
        for target in NO_TARGETS:
            status, body = await raw(up, request(target, key=KEY.encode()))
            assert status in (0, 400, 404), (target, status, body)
            if body:
                assert json.loads(body)["error"]["message"]
        assert not engine.asked("/v1/chat/completions")


async def test_another_method_on_a_known_route_is_405_and_names_the_right_one(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with guarded(engine, tmp_path) as up:
        for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
            answer = await up.client.request(method, "/v1/chat/completions", headers=BEARER)
            assert answer.status_code == 405, method
            assert answer.headers["allow"] == "POST"
            assert method == "HEAD" or answer.json()["error"]["code"] == "method_not_allowed"
            if method != "GET":
                other = await up.client.request(method, "/v1/models", headers=BEARER)
                assert (other.status_code, other.headers["allow"]) == (405, "GET"), method
        assert not engine.asked("/v1/chat/completions")


async def test_connect_and_invented_methods_get_nowhere(engine: FakeEngine, tmp_path: Path) -> None:
    async with guarded(engine, tmp_path) as up:
        for method in (b"CONNECT", b"post", b"POST\t", b"FOO", b"P\xd6ST"):
            for target in (b"/v1/chat/completions", b"169.254.169.254:80"):
                status, _ = await raw(up, request(target, method, KEY.encode()))
                assert status in (0, 400, 401, 404, 405), (method, target)
        assert not engine.asked("/v1/chat/completions")
        assert (await up.client.post("/v1/chat/completions", json=CHAT, headers=BEARER)).status_code == 200


async def test_an_absolute_target_of_an_allowed_route_is_served_here_whatever_host_it_names(
    engine: FakeEngine, tmp_path: Path
) -> None:
    """As HTTP/1.1 asks of every server; the host of the target is not followed."""
    async with guarded(engine, tmp_path) as up:
        status, _ = await raw(up, request(b"http://169.254.169.254/v1/chat/completions", key=KEY.encode()))
        assert status == 200
        assert lower(engine.asked("/v1/chat/completions")[0].headers)["host"] == engine.url.removeprefix("http://")


async def test_a_client_that_offers_an_upgrade_is_served_without_it(engine: FakeEngine, tmp_path: Path) -> None:
    """Java's client offers h2c on every plain-text request; a WebSocket is not to be had here."""
    async with guarded(engine, tmp_path) as up:
        for offer in (b"h2c", b"websocket"):
            plain = request(b"/v1/chat/completions", key=KEY.encode())
            offered = plain.replace(b"Connection: close", b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + offer)
            status, body = await raw(up, offered)
            assert (status, offer) == (200, offer), body


async def test_every_v1_route_needs_a_key(engine: FakeEngine, tmp_path: Path) -> None:
    async with guarded(engine, tmp_path) as up:
        for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/models", "/nowhere"):
            answer = await up.client.request("GET" if path == "/v1/models" else "POST", path, json=CHAT)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await up.client.get("/healthz")).status_code == 200
        assert (await up.client.get("/readyz")).status_code == 200


SECRET_HEADERS = [
    "Authorization",
    "X-Api-Key",
    "Api-Key",
    "X-Goog-Api-Key",
    "Cookie",
    "Proxy-Authorization",
    "X-Auth-Token",
    "X-Amz-Security-Token",
    "Ocp-Apim-Subscription-Key",
    "X-Forwarded-For",
    "X-Forwarded-Authorization",
    "X-Real-Ip",
    "Forwarded",
    "Openai-Organization",
    "Anthropic-Version",
    "X-Stainless-Lang",
    "X-Correlation-Token",
    "X-Vault-Token",
    "User-Agent",
    "Referer",
    "Origin",
    "Baggage",
    "Traceparent",
    "Tracestate",
    "X-Data-Parallel-Rank",
    "X-Session-Id",
]
ALLOWED_UPSTREAM = {"host", "accept", "user-agent", "content-type", "content-length", "x-request-id", "accept-encoding"}


async def test_upstream_headers_are_an_allow_list_and_no_clients_secret_is_among_them(engine: FakeEngine) -> None:
    async with serve([engine.url]) as up:
        headers = {name: f"canary-{name}" for name in SECRET_HEADERS}
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"model": MODEL, "prompt": "x"})):
            answer = await up.client.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            seen = engine.asked(path)[0].headers
            assert lower(seen).keys() <= ALLOWED_UPSTREAM, seen
            assert "canary" not in str(seen)


async def test_upstream_carries_the_gateways_own_key_only(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "engine-key").write_text("internal-key\n")
    async with guarded(engine, tmp_path, engine={"api_key_file": tmp_path / "engine-key"}) as up:
        assert (await up.client.post("/v1/chat/completions", json=CHAT, headers=BEARER)).status_code == 200
        seen = engine.asked("/v1/chat/completions")[0].headers
        assert lower(seen)["authorization"] == "Bearer internal-key"
        assert KEY not in str(seen)


async def test_what_an_engine_says_of_itself_in_headers_stays_behind_the_gateway(up: Running) -> None:
    answer = await up.chat()
    known = {"content-type", "content-length", "date", "x-request-id", "connection"}
    assert {name.lower() for name in answer.headers} <= known


async def test_an_unfit_request_id_is_replaced_and_an_engine_never_sees_two_alike(
    up: Running, engine: FakeEngine
) -> None:
    for sent in ("x" * 65, "a b", "ä".encode(), "a\tb", "../x"):
        answer = await up.client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": sent})
        assert answer.headers["x-request-id"] != sent
    for _ in range(2):
        answer = await up.client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine"})
        assert answer.headers["x-request-id"] == "mine"
    ids = [lower(seen.headers)["x-request-id"] for seen in engine.asked("/v1/chat/completions")]
    assert len(set(ids)) == len(ids)


# -- browsers ----------------------------------------------------------------------------------------------------------

APP = "https://app.example.com"


def preflight(origin: str, headers: str = "authorization,content-type") -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": headers,
    }


def cors_headers(answer: httpx.Response) -> set[str]:
    return {name.lower() for name in answer.headers if name.lower().startswith("access-control-")}


async def test_cors_is_off_by_default(engine: FakeEngine, tmp_path: Path) -> None:
    async with guarded(engine, tmp_path) as up:
        answer = await up.client.options("/v1/chat/completions", headers=preflight(APP))
        assert answer.status_code == 401
        assert not cors_headers(answer)


async def test_an_allowed_origin_may_ask_and_hears_errors_too_and_another_gets_no_permission(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with guarded(engine, tmp_path, cors={"allow_origins": [APP]}) as up:
        sdk = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
        asked = await up.client.options("/v1/chat/completions", headers=preflight(APP, sdk))
        assert asked.status_code == 204
        assert asked.headers["access-control-allow-origin"] == APP
        assert asked.headers["access-control-allow-headers"] == sdk
        assert "POST" in asked.headers["access-control-allow-methods"]
        refused = await up.client.post("/v1/chat/completions", json=CHAT, headers={"Origin": APP, **with_key("bad")})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == APP
        served = await up.client.post("/v1/chat/completions", json=CHAT, headers={"Origin": APP, **BEARER})
        assert served.status_code == 200
        assert served.headers["access-control-allow-origin"] == APP
        assert served.headers["vary"] == "Origin"
        for origin in ("https://evil.example.com", "https://app.example.com.evil", "null", APP + ":444", APP.upper()):
            other = await up.client.options("/v1/chat/completions", headers=preflight(origin))
            assert other.status_code == 401
            assert not cors_headers(other), origin
        for answer in (asked, refused, served):
            assert "access-control-allow-credentials" not in answer.headers


async def test_any_origin_is_a_star_without_credentials(engine: FakeEngine, tmp_path: Path) -> None:
    async with guarded(engine, tmp_path, cors={"allow_origins": ["*"]}) as up:
        answer = await up.client.post("/v1/chat/completions", json=CHAT, headers={"Origin": APP, **BEARER})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


async def test_a_preflight_can_not_write_headers_of_its_own(engine: FakeEngine) -> None:
    async with serve([engine.url], cors={"allow_origins": [APP]}) as up:
        answer = await up.client.options("/v1/chat/completions", headers=preflight(APP, "x: <script>"))
        assert answer.headers["access-control-allow-headers"] == "authorization, content-type"


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
