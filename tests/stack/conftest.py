"""A Docker engine, and on it the project's stack, brought up once from nothing for the whole session.

Where no Docker engine answers, one is started by the scripts in DOCKER_OFFLINE_DIR, which need no registry; images that
only a registry has are then stood in for by Debian's packages (tests/stack/standins).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.stack import checkout
from tests.stack.checkout import ROOT, Stack

PROJECT = "vllm-stack-test"
BASE = "python:3.11-slim-bookworm"
STANDINS = {
    "prom/prometheus": "prometheus",
    "prom/alertmanager": "alertmanager",
    "prom/node-exporter": "node-exporter",
    "caddy": "caddy",
}
NOT_HERE = {
    "engine": "the CUDA image needs an NVIDIA GPU",
    "gpu-exporter": "it needs an NVIDIA GPU",
    "quantize": "it needs an NVIDIA GPU; quantize-cpu is the same job without",
    "grafana": "without a registry there is no image, and Debian has no package",
}
SUMMARY = ROOT / "results" / "stack.json"
PART = ROOT / "results" / "stack-part.json"  # of runs that chose among the tests: each adds to what is there


class Docker(NamedTuple):
    """What a command needs in its environment to reach the engine, and whether it is the tests' own to stop."""

    env: dict[str, str]
    ours: bool


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """The machine's Docker engine, else that of the scripts; stopped at the end where it was started here."""
    if _docker({}, "version").returncode == 0:
        yield Docker({}, ours=False)
        return
    folder = os.environ.get("DOCKER_OFFLINE_DIR")
    if not folder:
        pytest.exit("no Docker engine answers: start one, or set DOCKER_OFFLINE_DIR", returncode=1)
    kept = Path(os.environ.get("DK_ROOT") or f"{os.environ.get('TMPDIR') or '/tmp'}/docker-offline")
    socket = os.environ.get("DK_SOCK") or f"{kept}/run/docker.sock"
    ran = _docker({"DOCKER_HOST": f"unix://{socket}"}, "version").returncode == 0
    started = subprocess.run(
        [f"{folder}/start-docker.sh"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if started.returncode != 0:
        pytest.exit(f"start-docker.sh: {(started.stdout + started.stderr).strip()}", returncode=1)
    env = dict(re.findall(r"(\w+)=(\S+)", started.stdout.rpartition("export ")[2]))
    try:
        yield Docker(env, ours=not ran)
    finally:
        if not ran:
            subprocess.run([f"{folder}/stop-docker.sh"], check=False, capture_output=True)


@pytest.fixture(scope="session")
def docker_env(docker: Docker) -> dict[str, str]:
    return docker.env


def _docker(env: Mapping[str, str], *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", *arguments], env=os.environ | env, input=text, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="session")
def images(docker_env: dict[str, str]) -> None:
    """What no registry can give is there under the name compose.yaml asks for."""
    folder = os.environ.get("DOCKER_OFFLINE_DIR")
    if not folder:
        return
    if _docker(docker_env, "image", "inspect", BASE).returncode != 0:
        subprocess.run(
            [f"{folder}/mkbase.sh", "bookworm", BASE], env=os.environ | docker_env, check=True, capture_output=True
        )
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    missing = {}
    for name, file in STANDINS.items():
        tag = re.search(rf"image: ({name}:\S+)", text)
        assert tag is not None
        if _docker(docker_env, "image", "inspect", tag[1]).returncode != 0:
            missing[tag[1]] = (ROOT / f"tests/stack/standins/{file}.Dockerfile").read_text(encoding="utf-8")

    def build(tag: str) -> subprocess.CompletedProcess[str]:
        return _docker(docker_env, "build", "-q", "-t", tag, "-", text=missing[tag])

    with ThreadPoolExecutor() as pool:  # each waits for Debian's mirror most of the time
        for built in pool.map(build, missing):
            assert built.returncode == 0, built.stderr


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ci: of the ten minutes that every commit gets (make test-stack ARGS='-m ci')")


def _summary_path(config: pytest.Config) -> Path:
    folders = all(Path(each).is_dir() for each in config.args)
    chosen = config.getoption("markexpr") or config.getoption("keyword") or not folders
    return PART if chosen else SUMMARY


@pytest.fixture(scope="session")
def summary(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What the tests measured; written to results/ at the end, and shown."""
    path = _summary_path(request.config)
    found: dict[str, Any] = {"faults": {}}
    if path == PART and path.exists():
        found = json.loads(path.read_text(encoding="utf-8")) | {"in_parts": True}
    yield found
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def stack(
    docker_env: dict[str, str], images: None, summary: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Up, from nothing, by `make up-cpu`; taken down with its volumes at the end."""
    del images
    made = checkout.make(tmp_path_factory.mktemp("checkout"), PROJECT, docker_env)
    made.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")  # what an aborted run left
    try:
        own = ("vllm-stack/gateway:local", "vllm-stack/engine-cpu:0.32.0")
        summary["images_were_there"] = all(
            _docker(docker_env, "image", "inspect", name).returncode == 0 for name in own
        )
        began = time.monotonic()
        up = made.make("up-cpu")
        summary["up_from_nothing_s"] = round(time.monotonic() - began, 1)
        assert up.returncode == 0, up.stdout + up.stderr + made.logs("engine-cpu")[-4000:]
        key = re.search(r"sk-[\w-]+", up.stdout)
        assert key is not None, up.stdout
        made.key = key[0]
        (made.root / "up.log").write_text(up.stdout, encoding="utf-8")
        yield made
    finally:
        made.http.close()
        made.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Which of the services were really started here."""
    path = _summary_path(config)
    if not path.exists():
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    terminalreporter.section("services")
    for name in found.get("started", []):
        terminalreporter.write_line(f"  started   {name}")
    for name, why in found.get("not_here", {}).items():
        terminalreporter.write_line(f"  not here  {name}: {why}")
