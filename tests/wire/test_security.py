"""The edge against those who try: routes and headers."""

import json
from pathlib import Path

import pytest

from tests.fakes.engine import MODEL, FakeEngine
from tests.wire.conftest import Running, serve
from tests.wire.guarding import BEARER, CHAT, KEY, guarded, lower, raw


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
