"""Three real engines with a small KV pool each, and one real gateway that learns of them from a file.

The engines run under the guard that leaves nothing behind; what the tests measure goes to results/scale.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from scripts import _ports, demo, model_fetch
from tests.engine.conftest import until

ENGINES = 3
START_S = 420  # three at once, on a busy machine
TOKEN = "a-token-of-these-tests-alone"
# 2,900 tokens each: a few conversations fit, all of them don't.
SMALL = ("--kv-cache-memory-bytes", "64M", "--max-model-len", "1024", "--max-num-seqs", "16")
# One thread each: three engines that each take all cores for themselves mostly wait for each other.
CORE = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SUMMARY = demo.ROOT / "results" / "scale.json"


@dataclass
class Engine:
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://{_ports.HOST}:{self.port}"

    def kill(self) -> None:
        """SIGKILL to all of its processes, as the kernel does when memory runs out."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def metric(self, name: str) -> float:
        page = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == name)


@dataclass
class Fleet:
    """Engines, the file that lists them, and the gateway in front."""

    engines: list[Engine]
    file: Path
    http: httpx.Client
    admin: httpx.Client
    start_engine: Callable[..., Engine]
    measured: dict[str, Any] = field(default_factory=dict)

    def name(self, *engines: Engine) -> None:
        """Name these in the file, the way the documentation says: whole, then renamed."""
        draft = self.file.with_suffix(".new")
        draft.write_text(json.dumps([{"targets": [f"{_ports.HOST}:{engine.port}" for engine in engines]}]))
        draft.rename(self.file)

    def status(self) -> dict[str, Mapping[str, Any]]:
        """Each replica's row of /status, by its URL."""
        answer = self.admin.get("/status")
        answer.raise_for_status()
        return {row["url"]: row for row in answer.json()["replicas"]}

    def state(self, engine: Engine) -> str:
        row = self.status().get(engine.url)
        return str(row["state"]) if row else "unknown"

    def ask(
        self, messages: list[dict[str, str]], tokens: int, at: str | None = None, model: str = demo.MODEL
    ) -> httpx.Response:
        """One chat, through the gateway or at an engine itself."""
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": tokens}
        return self.http.post(f"{at or ''}/v1/chat/completions", json=body)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = model_fetch.model_dir()
    assert not model_fetch.plan(model).fetch, f"the model is not in {model}: make model"
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "token").write_text(TOKEN)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    running: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(name: str, command: tuple[str, ...], env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], Path]:
        guard = (sys.executable, "-m", "scripts._guard", "--parent", str(os.getpid()), "--")
        log = folder / f"{name}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                (*guard, *command),
                env={**inherited, **env},
                cwd=demo.ROOT,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        running.append((process, log))
        return process, log

    def start_engine(name: str, *arguments: str) -> Engine:
        """Starts one, and does not wait for it; `arguments` go after the profile's."""
        port = _ports.free_port()
        service = demo.plan(demo.Ports(engine=port), model, None).services[0]
        return Engine(port, *start(name, (*service.command, *SMALL, *arguments), {**service.env, **CORE}))

    def all_up() -> bool:
        for process, log in running:
            if process.poll() is not None:
                end = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
                pytest.fail(f"{log.stem} ended with {process.returncode}:\n{end}", pytrace=False)
        return all(engine.healthy() for engine in engines)

    engines: list[Engine] = []
    try:
        engines += [start_engine(f"engine-{number}") for number in range(ENGINES)]
        until(all_up, f"{ENGINES} healthy engines (logs in {folder})", START_S)
        port, admin_port = _ports.free_port(), _ports.free_port()
        with (
            httpx.Client(base_url=f"http://{_ports.HOST}:{port}", timeout=120, trust_env=False) as http,
            httpx.Client(
                base_url=f"http://{_ports.HOST}:{admin_port}",
                timeout=120,
                trust_env=False,
                headers={"Authorization": f"Bearer {TOKEN}"},
            ) as admin,
        ):
            fleet = Fleet(engines, folder / "engines.json", http, admin, start_engine)
            fleet.name(*engines[:2])
            start(
                "gateway",
                (sys.executable, "-m", "gateway"),
                {
                    "GATEWAY_CONFIG": "configs/gateway.yaml",
                    "GATEWAY__LISTEN": f"{_ports.HOST}:{port}",
                    "GATEWAY__ADMIN_LISTEN": f"{_ports.HOST}:{admin_port}",
                    "GATEWAY__ENGINES": "[]",
                    "GATEWAY__DISCOVERY__FILES": json.dumps([str(fleet.file)]),
                    "GATEWAY__DISCOVERY__INTERVAL_S": "0.5",
                    "GATEWAY__ADMISSION__MAX_IN_FLIGHT": "6",  # the rest waits in the gateway, and has not begun
                    "GATEWAY__AUTH__DISABLED": "true",
                    "GATEWAY__AUTH__ADMIN_TOKEN_FILE": str(folder / "token"),
                },
            )
            until(lambda: _ready(http), "a ready gateway", 60)
            yield fleet
            SUMMARY.parent.mkdir(exist_ok=True)
            SUMMARY.write_text(json.dumps(fleet.measured, indent=2, sort_keys=True) + "\n")
            print(f"\n{SUMMARY.relative_to(demo.ROOT)}: {json.dumps(fleet.measured)}")
    finally:
        for process, _ in running:
            process.terminate()
        for process, _ in running:
            process.wait(30)


def _ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.HTTPError:
        return False
