"""One real engine with the real small model, and the real gateway in front of it, for the whole test session.

The processes are the demo's own (`scripts.demo.plan`) on free ports, each under the guard that leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from scripts import _ports, demo, model_fetch

START_S = 300  # an engine that takes longer, even on a busy machine, is broken
# The profile's bfloat16 knows logits only in steps of 0.125 where they decide, so two answers that are one step apart
# swap when a batch has another shape. float32 leaves such luck out: what then differs is somebody's mistake.
PRECISE = ("--dtype", "float32")


@dataclass(frozen=True)
class Stack:
    """Where everything listens. `http` talks to the gateway, `engine` past it."""

    url: str
    admin_url: str
    engine_url: str
    http: httpx.Client
    engine: httpx.Client
    model: str = demo.MODEL

    def chat(self, text: str, **fields: Any) -> httpx.Response:
        """A chat of one message through the gateway, at temperature 0 unless told otherwise."""
        messages = [{"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, "temperature": 0, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def completion(self, prompt: Any, **fields: Any) -> httpx.Response:
        """A completion through the gateway, at temperature 0 unless told otherwise."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **fields}
        return self.http.post("/v1/completions", json=body)

    def engine_metric(self, name: str) -> float:
        """A sample's value summed over its labels, from the engine. Raises KeyError for a name it does not export."""
        return _sum(self.engine.get("/metrics").text, name)

    def gateway_metric(self, name: str) -> float:
        """Likewise from the gateway's admin port."""
        return _sum(self.http.get(f"{self.admin_url}/metrics").text, name)

    def idle(self) -> None:
        """Until the engine has nothing to do, so that one test's leftovers are never another's."""
        until(lambda: self.engine_metric("vllm:num_requests_running") == 0, "an idle engine", 30)


def _sum(page: str, name: str) -> float:
    values = [s.value for family in text_string_to_metric_families(page) for s in family.samples if s.name == name]
    if not values:
        raise KeyError(name)
    return sum(values)


def until(condition: Callable[[], object], what: str, limit_s: float) -> None:
    """Polls; a condition that never holds fails the test by name."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not seen within {limit_s} s: {what}"
        time.sleep(0.05)


async def connected(client: httpx.AsyncClient, count: int) -> None:
    """Opens that many connections, so that who shares a merging window is not how fast a busy machine connects."""
    await asyncio.gather(*(client.get("/v1/models") for _ in range(count)))


def _answers(url: str) -> bool:
    """Whether a GET there is answered with 200 now."""
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


class Processes:
    """Services running under the guard that leaves nothing behind; each writes a log of its own into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._inherited = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def start(self, service: demo.Service) -> None:
        """Does not wait for it."""
        guard = (sys.executable, "-m", "scripts._guard", "--parent", str(os.getpid()), "--")
        log = self.log(service.name)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                (*guard, *service.command),
                env={**self._inherited, **service.env},
                cwd=demo.ROOT,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        self._running.append((process, log))

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Polls; one of them that ends meanwhile fails the test with its last lines."""

        def holds() -> object:
            for process, log in self._running:
                if process.poll() is not None:
                    end = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
                    pytest.fail(f"{log.stem} ended with {process.returncode}:\n{end}", pytrace=False)
            return condition()

        until(holds, f"{what} (logs in {self.folder})", START_S)

    def stop(self) -> None:
        for process, _ in self._running:
            process.terminate()
        for process, _ in self._running:
            process.wait(20)


@contextlib.contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    started = Processes(folder)
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = model_fetch.model_dir()
    assert not model_fetch.plan(model).fetch, f"the model is not in {model}: make model"
    ports = demo.Ports(_ports.free_port(), _ports.free_port(), _ports.free_port())
    url, admin, engine = (f"http://{_ports.HOST}:{p}" for p in (ports.gateway, ports.admin, ports.engine))
    with processes(tmp_path_factory.mktemp("stack")) as started:
        for service in demo.plan(ports, model, None).services:
            command = (*service.command, *PRECISE) if service.name == "engine" else service.command
            started.start(replace(service, command=command))
        started.until(lambda: _answers(f"{url}/readyz"), "a ready gateway")
        with (
            httpx.Client(base_url=url, timeout=120, trust_env=False) as http,
            httpx.Client(base_url=engine, timeout=120, trust_env=False) as direct,
        ):
            yield Stack(url, admin, engine, http, direct)


@pytest.fixture(autouse=True)
def _idle_between_tests(stack: Stack) -> Iterator[None]:
    yield
    stack.idle()
