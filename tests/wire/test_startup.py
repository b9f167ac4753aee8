"""Starts that can't be: one line that names key, value and expectation, and exit code 1."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.auth import Authenticator
from gateway.metrics import Metrics
from gateway.settings import Auth, SettingsError
from tests.wire.guarding import keys_file
from tests.wire.process import ROOT, environment, started

CASES: list[tuple[dict[str, str | None], str]] = [
    ({"auth__disabled": None}, "auth.keys_file is not set: expected the file `make keys NAME=app1` writes"),
    ({"auth__keys_file": "none.json"}, "auth.keys_file = 'none.json': No such file or directory; expected the file"),
    ({"auth__keys_file": "."}, "auth.keys_file = '.': Is a directory; expected"),
    ({"auth__keys_file": "empty.json"}, "auth.keys_file = 'empty.json': holds no key; expected"),
    ({"auth__keys_file": "text.json"}, "auth.keys_file = 'text.json': expected JSON"),
    ({"auth__admin_token_file": "none"}, "auth.admin_token_file = 'none': No such file or directory; expected"),
    ({"auth__admin_token_file": "short"}, "auth.admin_token_file = 'short': expected one secret of at least 16"),
    ({"engine__api_key_file": "none"}, "engine.api_key_file = 'none': No such file or directory; expected"),
    ({"engine__api_key_file": "blank"}, "engine.api_key_file = 'blank': expected one secret"),
    ({"ledger__path": "none/u"}, "ledger.path = 'none/u': unable to open database file; expected a SQLite file"),
    ({"ledger__path": "text.json"}, "ledger.path = 'text.json': file is not a database; expected a SQLite file"),
    ({"listen": "no.such.host.invalid:1"}, "listen = 'no.such.host.invalid:1': "),
    ({"listen": "192.0.2.1:1"}, "listen = '192.0.2.1:1': Cannot assign requested address; expected a free address"),
    ({"batching__window_ms": "-1"}, "batching.window_ms = '-1': expected at least 0"),
    ({"window_ms": "15"}, "GATEWAY__WINDOW_MS is not a setting"),
]
# One process for all of them: a start takes most of a second, the refusal nothing.
DRIVER = """
import contextlib, io, json, os, sys
from gateway.__main__ import main
for line in sys.stdin:
    for name in [name for name in os.environ if name.startswith("GATEWAY")]:
        del os.environ[name]
    os.environ.update(json.loads(line))
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        code = main([])
    print(json.dumps([code, told.getvalue()]), flush=True)
"""


def lay_out(folder: Path) -> None:
    keys_file(folder / "empty.json")
    (folder / "text.json").write_text("sk-canary is no JSON, and no database either" * 100)
    (folder / "short").write_text("canary\n")
    (folder / "blank").write_text("\n")


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Exit code and stderr of each case."""
    folder = tmp_path_factory.mktemp("startup")
    lay_out(folder)
    lines = []
    for settings, _ in CASES:
        auth = {"auth__disabled": "false"} if "auth__keys_file" in settings else {}
        variables = environment(["http://127.0.0.1:1"], **{**auth, **settings})
        lines.append(json.dumps({name: value for name, value in variables.items() if name.startswith("GATEWAY")}))
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[expected[:40] for _, expected in CASES])
def test_a_setting_that_can_not_be_is_one_line_and_exit_code_1(refusals: list[tuple[int, str]], number: int) -> None:
    code, told = refusals[number]
    assert code == 1
    assert told.startswith(f"gateway: {CASES[number][1]}"), told
    assert told.count("\n") == 1
    assert "canary" not in told


async def refused(cwd: Path, **settings: Any) -> list[str]:
    async with started(["http://127.0.0.1:1"], cwd=cwd, **settings) as gateway:
        code = await gateway.ended()
        assert not gateway.lines, gateway.lines
        assert code == 1, gateway.unparsed
        return gateway.unparsed


async def test_several_mistakes_are_several_lines(tmp_path: Path) -> None:
    lines = await refused(tmp_path, listen="x", batching__window_ms="x", nonsense="x")
    assert len(lines) == 3


@pytest.mark.parametrize("name", ["listen", "admin_listen"])
async def test_a_busy_port_is_named(tmp_path: Path, name: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        (line,) = await refused(tmp_path, **{name: address})
        assert line.startswith(f"gateway: {name} = '{address}': Address already in use; expected a free address")


async def test_of_two_gateways_on_one_port_exactly_one_serves(tmp_path: Path) -> None:
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{finder.getsockname()[1]}"
    engines = ["http://127.0.0.1:1"]
    async with (
        started(engines, cwd=tmp_path, listen=address) as one,
        started(engines, cwd=tmp_path, listen=address) as two,
    ):
        losers = {asyncio.create_task(gateway.process.wait()) for gateway in (one, two)}
        done, pending = await asyncio.wait(losers, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [1]
        (winner,) = [gateway for gateway in (one, two) if gateway.process.returncode is None]
        await winner.serving()
        for task in pending:
            task.cancel()


def test_an_unreadable_keys_file_is_named(tmp_path: Path) -> None:
    file = keys_file(tmp_path / "keys.json", one={})
    file.chmod(0)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises(SettingsError, match=r"^auth\.keys_file = '.*': Permission denied; expected the file"):
            Authenticator(Auth(keys_file=file), Metrics())
    finally:
        os.seteuid(before)


async def test_help_explains_and_a_wrong_argument_is_wrong_usage(tmp_path: Path) -> None:
    async with started([], "--port", "8080", cwd=tmp_path) as gateway:
        assert await gateway.ended() == 2
        assert "unrecognized arguments" in gateway.unparsed[-1]
    async with started([], "--help", cwd=tmp_path) as gateway:
        assert await gateway.ended() == 0


async def test_the_log_is_json_line_by_line_and_says_where_it_serves(tmp_path: Path) -> None:
    async with started(["http://127.0.0.1:1"], cwd=tmp_path) as gateway:
        await gateway.serving()
        line = next(line for line in gateway.lines if line["event"] == "serving")
        assert {"at", "level", "logger", "public", "admin"} <= line.keys()
        assert not gateway.unparsed
        assert json.dumps(line)
