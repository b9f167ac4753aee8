"""Browsers: who may ask from which page, and what a preflight can do."""

from pathlib import Path

import httpx

from tests.fakes.engine import FakeEngine
from tests.wire.conftest import serve
from tests.wire.guarding import BEARER, CHAT, guarded, with_key

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
