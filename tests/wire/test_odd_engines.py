"""An engine (or what a proxy makes of one) that answers nonsense harms its own answer at most, never the gateway."""

import json
import logging
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import sse
from scripts import usage
from tests.fakes.engine import MODEL, FakeEngine, Script
from tests.wire.conftest import Running, serve, until
from tests.wire.process import started

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DELTA = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def answer_with(**told: Any) -> Script:
    document = {"id": "x", "object": "chat.completion", "choices": [], "usage": told}
    return Script(body=json.dumps(document).encode(), headers={"Content-Type": "application/json"})


async def streamed(up: Running) -> bytes:
    async with up.stream() as answer:
        assert answer.status_code == 200
        return await answer.aread()


# -- usage that can't be true ------------------------------------------------------------------------------------------

IMPOSSIBLE = [
    {"prompt_tokens": 2**63 - 1, "completion_tokens": 1},
    {"prompt_tokens": 10**30, "completion_tokens": 1},
    {"prompt_tokens": 5, "completion_tokens": -1},
    {"prompt_tokens": -5, "completion_tokens": 1},
    {"prompt_tokens": True, "completion_tokens": 1},
]


async def test_usage_that_can_not_be_true_is_no_usage_and_the_ledger_lives_on(
    engine: FakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "u"
    async with started([engine.url], ledger__path=path) as gateway, httpx.AsyncClient(trust_env=False) as client:
        await gateway.serving()

        async def ask() -> int:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "temperature": 1}
            return (await client.post(f"{gateway.url}{CHAT}", json=body)).status_code

        async def is_ready() -> bool:
            return (await client.get(f"{gateway.url}/readyz")).status_code == 200

        await until(is_ready)
        for told in IMPOSSIBLE:
            engine.script(CHAT, answer_with(**told))
            assert await ask() == 200
        await until(lambda: usage.rows(path, None, None, None))
        engine.script(CHAT, answer_with(prompt_tokens=5, completion_tokens=7))
        assert await ask() == 200
        page = (await client.get(f"{gateway.admin_url}/metrics")).text
        assert 'gateway_requests_total{route="/v1/chat/completions",status="200",tenant="anonymous"} 6.0' in page
        assert "gateway_ledger_failures_total 0.0" in page
        gateway.signal(signal.SIGTERM)
        assert await gateway.ended() == 0
        gateway.assert_no_traceback()
        assert len([line for line in gateway.lines if line["event"] == "request" and line["route"] == CHAT]) == 6
    ((_, _, _, requests, _, _, prompt, generation),) = usage.rows(path, None, None, None)
    assert (requests, prompt, generation) == (6, 5, 7)


async def test_a_metric_that_refuses_costs_neither_the_ledgers_entry_nor_the_logs_line(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr("gateway.middleware.write_access", lines.append)
    logs = {"access": True}
    async with serve([engine.url], ledger={"path": tmp_path / "u"}, logs=logs) as up:

        def refuses(*_: str) -> Any:
            raise ValueError("counters only go up")

        monkeypatch.setattr(up.gateway.edge, "_used", refuses)
        assert (await up.chat(temperature=1)).status_code == 200
        await up.settled()
    assert [line["status"] for line in lines if line["route"] == CHAT] == [200]
    assert [row[3] for row in usage.rows(tmp_path / "u", None, None, None)] == [1]


# -- events of the wrong types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [
        b'{"choices":5}',
        b'{"choices":[null]}',
        b'{"choices":{"a":1}}',
        b'{"choices":[{"delta":[1]}]}',
        b'{"type":[],"delta":{}}',
        b'{"usage":5,"choices":7}',
        b'{"usage":{"prompt_tokens":-1},"choices":null}',
        b'{"response":[],"message":3}',
        b'{"error":[]}',
        b"5",
    ],
)
@pytest.mark.parametrize("place", ["first", "later"])
async def test_an_event_of_the_wrong_types_is_passed_on_as_it_came(
    odd: bytes, place: str, up: Running, engine: FakeEngine
) -> None:
    event = b"data: " + odd + b"\n\n"
    pieces = [event, DELTA, DONE] if place == "first" else [DELTA, event, DONE]
    engine.script(CHAT, Script(pieces=list(pieces)))
    assert await streamed(up) == b"".join(pieces)


async def test_a_failure_of_our_own_beside_the_stream_is_one_error_event_and_logged_with_its_trace(
    up: Running, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: object) -> bool:
        raise TypeError("a bug")

    monkeypatch.setattr(sse, "has_content", fails)
    engine.script(CHAT, Script(pieces=[DELTA, DELTA, DONE]))
    text = await streamed(up)
    assert text.count(b"data:") == 1
    assert b'"internal_error"' in text
    await until(lambda: any(record.exc_info for record in caplog.records if record.levelno == logging.ERROR))
    assert await up.metric("gateway_upstream_failures_total", cause="unreadable_stream") == 1


# -- heads and ends ----------------------------------------------------------------------------------------------------


async def test_a_status_that_no_client_could_be_told_is_a_502(up: Running, engine: FakeEngine) -> None:
    engine.script(COMPLETIONS, Script(status=700, body=b"{}"))
    answer = await up.completion("p")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
    assert "700" in answer.json()["error"]["message"]


async def test_a_retry_after_that_is_none_is_left_out(up: Running, engine: FakeEngine) -> None:
    engine.script(COMPLETIONS, Script(status=500, body=b'{"error":{"message":"x"}}', headers={"Retry-After": "\u00ff"}))
    answer = await up.completion("p")
    assert answer.status_code == 500
    assert "retry-after" not in answer.headers


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_that_nobody_asked_for_is_no_answer(path: str, up: Running, engine: FakeEngine) -> None:
    engine.script(path, Script(body=DELTA + DONE, headers={"Content-Type": "text/event-stream"}))
    answer = await (up.chat(temperature=1) if path == CHAT else up.completion("p", temperature=1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")


async def test_a_content_type_in_any_case_is_a_stream(up: Running, engine: FakeEngine) -> None:
    engine.script(CHAT, Script(body=DELTA + DONE, headers={"Content-Type": "Text/Event-Stream"}))
    async with up.stream() as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert await answer.aread() == DELTA + DONE


@pytest.mark.parametrize("end", [b"data: [DONE]\n", b"data: [DONE]\r\n", b"data: [DONE]"])
async def test_a_last_event_without_its_blank_line_is_the_end_and_gets_one(
    end: bytes, up: Running, engine: FakeEngine
) -> None:
    engine.script(CHAT, Script(pieces=[DELTA, end]))
    assert sse.split(await streamed(up)) == [DELTA, end.removesuffix(b"\n") + b"\n\n"]
    await up.settled()
    assert await up.metric("gateway_upstream_failures_total") == 0


@pytest.mark.parametrize("end", [b'data: {"choices":[]}\n', b"data: [DO", b'data: {"text":"[DONE]"}\n'])
async def test_any_other_event_without_its_blank_line_is_a_broken_stream(
    end: bytes, up: Running, engine: FakeEngine
) -> None:
    engine.script(CHAT, Script(pieces=[DELTA, end]))
    text = await streamed(up)
    assert text.startswith(DELTA)
    assert b'"engine_failed"' in text
    assert end not in text


async def test_an_answer_larger_than_the_limit_is_a_502(engine: FakeEngine) -> None:
    async with serve([engine.url], limits={"max_answer_bytes": 2000}) as up:
        large = json.dumps({"id": "x", "object": "text_completion", "choices": [], "more": "x" * 2000}).encode()
        engine.script(COMPLETIONS, Script(body=large, headers={"Content-Type": "application/json"}))
        answer = await up.completion("p")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
        assert (await up.completion("p")).status_code == 200
        await up.settled()
