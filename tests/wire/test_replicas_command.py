"""`make replicas` against a real gateway; only the way into its container is left out."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import _gateway_side, replicas
from tests.fakes.engine import FakeEngine
from tests.wire.conftest import Running, free_socket, serve, until

Command = Callable[..., Any]


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "admin_token"
    file.write_text("t" * 40)
    return file


def command(up: Running, token: Path) -> Command:
    env = {"GATEWAY__ADMIN_LISTEN": up.admin_url, "GATEWAY__AUTH__ADMIN_TOKEN_FILE": str(token)}

    def ask(method: str, path: str, body: Any) -> tuple[int, str]:
        order = {"to": "admin", "method": method, "path": path, "body": body, "timeout_s": 5}
        answer = _gateway_side.ask(order, env)
        return answer["status"], answer["text"]

    async def run(*argv: str) -> int:
        return await asyncio.to_thread(replicas.main, argv, ask)

    return run


async def test_an_engine_is_shown_drained_and_brought_back(token: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeEngine() as engine, serve([engine.url], auth={"admin_token_file": token}) as up:
        run = command(up, token)
        assert await run() == 0
        assert capsys.readouterr().out == f"{engine.url}  ready  0 calls, circuit closed\n"
        assert await run("--drain", engine.url, "--dry-run") == 0
        assert up.gateway.replicas.ready()
        assert await run("--drain", engine.url) == 0
        assert "draining" in capsys.readouterr().out
        assert not up.gateway.replicas.ready()
        assert await run() == 1
        assert await run("--back", engine.url) == 0
        await until(up.gateway.replicas.ready)


async def test_an_engine_that_is_away_and_a_file_that_cannot_be_used_are_named(
    token: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with free_socket() as nobody:
        away = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    file = tmp_path / "engines.json"
    settings: dict[str, Any] = {"auth": {"admin_token_file": token}, "discovery": {"files": [file], "interval_s": 0.05}}
    async with serve([away], wait=False, **settings) as up:
        run = command(up, token)
        await until(lambda: up.gateway.health.status()["discovery"][0]["problem"])
        assert await run() == 1
        engine, source = capsys.readouterr().out.splitlines()
        assert engine.startswith(f"{away}  down  0 calls, circuit ")
        assert source.startswith(f"{file}  0 engines  ")
        assert await run("--json") == 1
        assert json.loads(capsys.readouterr().out)["replicas"][0]["url"] == away


async def test_what_the_gateway_refuses_is_one_line(token: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeEngine() as engine, serve([engine.url], auth={"admin_token_file": token}) as up:
        run = command(up, token)
        assert await run("--drain", "http://127.0.0.1:1") == 3
        assert "answered 400: no replica has this URL" in capsys.readouterr().err
        token.with_name("other").write_text("u" * 40)
        assert await command(up, token.with_name("other"))() == 3
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert "send the admin token" in err
