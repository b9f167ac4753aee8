"""A backup of the running stack, and the stack from it: other volumes, another machine for all it knows."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.stack.checkout import Stack, until
from tests.stack.load import ANSWERED, Load
from tests.stack.test_2_faults import ENGINE_HEALS_S, engine_ready, settle


def gateway_up(stack: Stack, at: float) -> list[Any]:
    """What Prometheus knows of the gateway at that time of the wall clock."""
    url = f"http://127.0.0.1:{stack.ports['PROMETHEUS_PORT']}/api/v1/query"
    answer = stack.http.get(url, params={"query": "up{job='gateway'}", "time": at})
    found: list[Any] = answer.json()["data"]["result"] if answer.status_code == 200 else []
    return found


def ledger(stack: Stack) -> dict[str, int]:
    """Tenant -> requests, as the gateway's own file says."""
    source = (
        "import sqlite3, json\n"
        "rows = sqlite3.connect('/var/lib/gateway/usage.sqlite').execute("
        "'SELECT tenant, SUM(requests) FROM usage GROUP BY tenant')\n"
        "print(json.dumps(dict(rows.fetchall())))"
    )
    found: dict[str, int] = json.loads(stack.python("gateway", source))
    return found


def test_a_backup_costs_no_request_and_brings_all_of_it_back(stack: Stack, summary: dict[str, Any]) -> None:
    """Keys, ledger and series survive the loss of every volume and of the secrets."""
    until(lambda: engine_ready(stack), "a ready engine", ENGINE_HEALS_S)
    with Load(stack, clients=2) as load:
        began_s = settle(load)
        known_s = time.time()
        made = stack.make("backup", "FILE=backups/one.tar")
        assert made.returncode == 0, made.stdout + made.stderr
        answered = len(load.seen)
        until(lambda: len(load.seen) > answered + 2, "answers after the backup", 60)
        outcomes = load.outcomes(began_s)
    assert set(outcomes) == {ANSWERED}
    path = stack.root / "backups/one.tar"
    assert path.stat().st_mode & 0o777 == 0o600
    summary["backup_mb"] = round(path.stat().st_size / 1e6, 1)
    until(lambda: stack.inspect("prometheus")["State"]["Health"]["Status"] == "healthy", "Prometheus back", 60)
    before = ledger(stack)
    assert before["default"] >= 6

    running = stack.make("restore", "FILE=backups/one.tar", "ARGS=--replace")
    assert running.returncode != 0
    assert "the stack is running" in running.stderr

    assert stack.make("down", "ARGS=--grace-s 10").returncode == 0
    own = stack.make("restore", "FILE=backups/one.tar")
    assert own.returncode != 0
    assert "this would replace .env, secrets/keys.json" in own.stderr
    assert stack.compose("down", "--volumes").returncode == 0
    shutil.rmtree(stack.root / "secrets")

    restored = stack.make("restore", "FILE=backups/one.tar", "ARGS=--replace")
    assert restored.returncode == 0, restored.stdout + restored.stderr
    up = stack.make("up-cpu")
    assert up.returncode == 0, up.stdout + up.stderr
    assert "first key" not in up.stdout
    assert stack.chat().status_code == 200  # with the key of before
    assert ledger(stack)["default"] >= 6
    until(lambda: gateway_up(stack, known_s), "the series of before", 60)


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_backup_is_refused_before_anything_is_touched(stack: Stack, damage: str) -> None:
    good = (stack.root / "backups/one.tar").read_bytes()
    at = good.index(b"files/.env") + 700  # within the contents of .env
    bad = good[: len(good) // 2] if damage == "cut" else good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
    (stack.root / "backups/bad.tar").write_bytes(bad)
    refused = stack.make("restore", "FILE=backups/bad.tar", "ARGS=--replace")
    assert refused.returncode != 0
    assert "is damaged" in refused.stderr


def test_a_backup_that_meets_a_full_disk_leaves_nothing_behind(stack: Stack, tmp_path: Path) -> None:
    """A real file system of 64 kB. Prometheus runs on, and nothing of ours stays in its volume."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], check=False).returncode != 0:
        pytest.skip("this machine lets nobody mount a file system")
    try:
        failed = stack.make("backup", f"FILE={small}/a.tar")
        left = list(small.iterdir())
    finally:
        subprocess.run(["umount", small], check=True)
    assert failed.returncode != 0
    assert "No space left on device; nothing was made" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert left == []
    until(lambda: stack.inspect("prometheus")["State"]["Running"], "Prometheus", 30)

    def left_in_the_volume() -> bool:
        return ".backup" in stack.compose("exec", "-T", "prometheus", "ls", "-A", "/prometheus").stdout

    until(lambda: not left_in_the_volume(), "an end of the links", 30)
