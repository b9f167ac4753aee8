"""No key, prompt, answer or token in logs, metrics, errors or process arguments, whatever goes wrong."""

import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gateway.logs import JsonFormatter
from tests.fakes.engine import MODEL, FakeEngine, Script
from tests.wire.conftest import until
from tests.wire.guarding import keys_file
from tests.wire.process import started

KEY = "sk-canary-key-one"
BAD_KEY = "sk-canary-key-unknown"
ENGINE_KEY = "canary-engine-key"
ADMIN = "canary-admin-token-long-enough"
PROMPT = "canary-prompt-of-the-client"
BEARER = {"Authorization": f"Bearer {KEY}"}


def requests() -> list[dict[str, Any]]:
    """Good ones and bad ones, each with a prompt and headers that nobody may see again."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2, "user": "canary-user"}
    body = json.dumps(chat)
    headers = {**BEARER, "Cookie": "canary-cookie", "X-Other-Secret": "canary-header"}
    return [
        {"json": chat, "headers": headers},
        {"json": {**chat, "stream": True}, "headers": headers},
        {"json": chat, "headers": {"Authorization": f"Bearer {BAD_KEY}"}},
        {"json": chat, "headers": {"Authorization": "Basic canary-basic"}},
        {"json": chat},
        {"json": chat, "headers": headers, "params": {"api_key": "canary-query", "key": KEY}},
        {"json": {**chat, "n": "canary-n"}, "headers": headers},
        {"json": {**chat, "stream": "canary-stream"}, "headers": headers},
        {"json": {**chat, "messages": "canary-messages"}, "headers": headers},
        {"json": {**chat, "chat_template": "canary-template"}, "headers": headers},
        {"content": body[:-5].encode(), "headers": {**headers, "Content-Type": "application/json"}},
        {"content": body.encode() + b"canary", "headers": {**headers, "Content-Type": "application/json"}},
        {"content": b"canary" * 20, "headers": {**headers, "Content-Type": "text/canary"}},
        {"content": b"\xff canary \x00", "headers": {**headers, "Content-Type": "application/json"}},
        {"json": chat, "headers": {**headers, "X-Request-Timeout-S": "canary-timeout"}},
        {"json": chat, "headers": {**headers, "X-Request-Id": "canary id that is unfit"}},
        {"json": chat, "headers": {**headers, "Traceparent": "canary-parent"}},
    ]


FAULTS = [
    Script(status=500, body=b'{"error":{"message":"x"}}'),
    Script(status=502, body=b"<html>canary-page</html>", headers={"Content-Type": "text/html"}),
    Script(body=b"canary-not-json"),
    Script(status=401, body=b'{"error":"canary-unauthorized"}'),
    Script(reset_before_answer=True),
]


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
async def test_canaries_appear_nowhere(engine: FakeEngine, tmp_path: Path, level: str) -> None:
    engine.api_key = ENGINE_KEY
    (tmp_path / "engine-key").write_text(ENGINE_KEY + "\n")
    (tmp_path / "admin-token").write_text(ADMIN + "\n")
    keys = keys_file(tmp_path / "keys.json", one={"key": KEY})
    settings: dict[str, Any] = {
        "auth__disabled": None,
        "auth__keys_file": keys,
        "auth__admin_token_file": tmp_path / "admin-token",
        "auth__reload_s": 0.05,
        "engine__api_key_file": tmp_path / "engine-key",
        "ledger__path": tmp_path / "usage.sqlite",
        "cors__allow_origins": '["https://app.example.com"]',
        "logs__level": level,
    }
    errors: list[str] = []
    async with started([engine.url], **settings) as gateway, httpx.AsyncClient(trust_env=False, timeout=20) as client:
        await gateway.serving()

        async def is_ready() -> bool:
            return (await client.get(f"{gateway.url}/readyz")).status_code == 200

        await until(is_ready)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/canary-path", "/v1/models/canary"):
            for request in requests():
                answer = await client.post(f"{gateway.url}{path}", **request)
                if answer.status_code >= 400:
                    errors.append(answer.text)
        mistaken = {**requests()[0], "json": {**requests()[0]["json"], "model": KEY}}  # its answer quotes it, no more
        for path in ("/v1/chat/completions", "/v1/completions"):
            assert (await client.post(f"{gateway.url}{path}", **mistaken)).status_code in (400, 404)
        for fault in FAULTS:
            engine.script("/v1/chat/completions", fault)
            answer = await client.post(f"{gateway.url}/v1/chat/completions", **requests()[0])
            assert answer.status_code >= 500
            errors.append(answer.text)
        engine.script("/v1/chat/completions", Script(reset_after=1))
        async with client.stream("POST", f"{gateway.url}/v1/chat/completions", **requests()[1]) as answer:
            errors.append((await answer.aread()).decode().partition('{"error"')[2])
        errors.append((await client.get(f"{gateway.admin_url}/status", headers={"X-Api-Key": BAD_KEY})).text)
        keys.write_text(f'{{"{KEY}": "app1"}}')
        await until(lambda: any("keys file" in event for event in gateway.events()))
        status = (await client.get(f"{gateway.admin_url}/status", headers={"Authorization": f"Bearer {ADMIN}"})).text
        metrics = (await client.get(f"{gateway.admin_url}/metrics")).text
        process = psutil.Process(gateway.process.pid)
        arguments = " ".join(process.cmdline())
        variables = str({name: value for name, value in process.environ().items() if name.startswith("GATEWAY")})
        gateway.signal(signal.SIGTERM)
        assert await gateway.ended() == 0
        log = json.dumps(gateway.lines) + "".join(gateway.unparsed)
    assert gateway.events().count("request") > 50
    lines = [line for line in gateway.lines if line["event"] == "request" and line["route"] == "/v1/chat/completions"]
    assert {line["model"] for line in lines if line["status"] == 404} == {"unknown"}
    assert {line["model"] for line in lines if line["status"] == 200} == {MODEL}
    known = str(tmp_path)  # the test's own folder is named after it
    for name, text in (("log", log), ("metrics", metrics), ("status", status), ("argv", arguments), ("env", variables)):
        assert "canary" not in text.replace(known, ""), (name, _around(text.replace(known, "")))
    told = "".join(errors)
    for secret in (
        KEY,
        BAD_KEY,
        ENGINE_KEY,
        ADMIN,
        PROMPT,
        "canary-cookie",
        "canary-header",
        "canary-basic",
        "canary-page",
    ):
        assert secret not in told, secret
    assert b"canary" not in ledger_bytes(tmp_path)


def ledger_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir() if path.name.startswith("usage"))


def _around(text: str) -> str:
    at = text.index("canary")
    return text[max(0, at - 200) : at + 100]


def test_a_bugs_trace_names_places_and_types_but_quotes_no_value() -> None:
    try:
        try:
            json.loads("canary-prompt")
        except ValueError as error:
            raise KeyError("canary-key") from error
    except KeyError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "unexpected failure", None, sys.exc_info())
    line = JsonFormatter().format(record)
    assert "canary" not in line
    chain = json.loads(line)["exception"]["chain"]
    assert [error["type"] for error in chain] == ["builtins.KeyError", "json.decoder.JSONDecodeError"]
    assert "test_secrets.py" in chain[0]["frames"][-1]
