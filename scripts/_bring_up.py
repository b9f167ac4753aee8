"""Starting the stack, after the machine was found fit: images, services, the wait, and the way back from a failure."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from scripts import _journal, _one_shot, _secrets
from scripts._compose import JOBS, ROOT, Compose, ComposeError, Container, failure
from scripts._demo_talk import Terminal, answers
from scripts._running import ENGINES, Stack, SwapError
from scripts.checks import Check, model
from scripts.checks.subject import Subject

LOG_LINES = 15


class UpError(Exception):
    """The stack did not come up; the message is for people, its first line the cause."""


def awaited(containers: Sequence[Container]) -> str:
    """What is not there yet, in words."""
    return ", ".join(f"{found.service} ({found.said or found.health or found.state})" for found in _unwell(containers))


def _unwell(containers: Sequence[Container]) -> list[Container]:
    return [found for found in containers if not found.well]


class Up:
    """One run of `make up`, after the machine was found fit."""

    def __init__(self, compose: Compose, subject: Subject, wait_s: float, terminal: Terminal) -> None:
        self._compose = compose
        self._subject = subject
        self._wait_s = wait_s
        self._terminal = terminal
        environ = subject.environ
        self.gateway = f"http://127.0.0.1:{environ.get('GATEWAY_PORT') or 8080}"
        self.prometheus = f"http://127.0.0.1:{environ.get('PROMETHEUS_PORT') or 9090}"
        self.grafana = f"http://127.0.0.1:{environ.get('GRAFANA_PORT') or 3000}"

    def run(self) -> None:
        """Raises UpError, ComposeError; then nothing is left of a first start, and the old engine is back otherwise."""
        before = self._compose.containers()
        try:
            self._start()
        except (UpError, ComposeError, _one_shot.JobError):
            self._take_back(before)
            raise

    def _start(self) -> None:
        images = self._compose.images()
        self._terminal.line(f"images      builds {', '.join(images.to_build) or 'what changed'}")
        if images.to_build:
            self._compose.show("build", *images.built_services)
        else:
            self._compose.run("build", "--quiet", *images.built_services)
        if images.to_pull:  # after the build: one image may be of another service's making
            self._terminal.line(f"images      pulls {', '.join(images.to_pull)}")
            self._compose.show("pull", "--policy", "missing", *images.pulled_services)
        if _one_shot.wanted(self._compose.profiles):
            _one_shot.run(self._compose, images.services, self._terminal)
            _stop_at(model.checks(self._subject))
            rest = [name for name in images.services if name not in JOBS]  # or the job would run once more
            self._compose.run("up", "--detach", "--no-build", "--no-deps", *rest)
        else:
            self._compose.run("up", "--detach", "--no-build", "--remove-orphans")
        self._settle()
        self._wait()

    def _settle(self) -> None:
        """What an interrupted change left: its engine was not recorded, so what was started now is the one before."""
        left = _journal.read()
        if left is None:
            return
        self._terminal.line(f"found an interrupted change ({left.phase}): {left.what}")
        with suppress(SwapError, ComposeError):  # a gateway that was just made anew holds nothing back
            Stack.running(self._compose).drain(on=False)
        if left.kind == "upgrade":
            _journal.clear()
            self._terminal.line("the engine that .env names is started")
        else:
            self._terminal.line(f"`make {left.kind}` ends it")

    def _wait(self) -> None:
        pause = threading.Event()
        with httpx.Client(timeout=5, trust_env=False) as client:
            while True:
                containers = self._compose.containers()
                if broken := failure(containers):
                    raise UpError(self._explain(*broken))
                ready, why = answers(client, f"{self.gateway}/readyz")
                if ready and not _unwell(containers):
                    return
                text = awaited(containers) or f"the gateway: {why or 'not answering yet'}"
                if self._terminal.seconds > self._wait_s:
                    raise UpError(f"not ready after {self._wait_s:.0f} s: waiting for {text}")
                self._terminal.waiting(f"waiting for {text}")
                pause.wait(1)

    def _explain(self, service: str, why: str) -> str:
        tail = "".join(f"\n    {line}" for line in self._compose.tail(service, LOG_LINES))
        return f"{service}: {why}\n  its last lines:{tail}"

    def _take_back(self, before: Sequence[Container]) -> None:
        """Nothing runs after a failed first start; after another one the old engine does."""
        if not before:
            self._terminal.line("taking back what was started")
            self._compose.run("down", "--timeout", "10")
            return
        old = next((found for found in before if found.service.startswith("engine")), None)
        now = {found.service: found.id for found in self._compose.containers()}
        if old is None or now.get(old.service) == old.id or not old.running:
            return
        env = {name: old.env.get(name, "") for name in ("ENGINE_PROFILE", "ENGINE_ARGS")}
        env[ENGINES[old.service]] = old.image
        self._terminal.line(f"going back to the engine before: ENGINE_PROFILE={env['ENGINE_PROFILE']}")
        Compose(self._compose.profiles, self._compose.env | env).run("up", "--detach", "--no-build", old.service)

    def recipe(self, key: str | None) -> str:
        """Where it is, and a request to copy."""
        folder = _secrets.folder(self._subject.environ)
        name = self._subject.profile.get("served-model-name", self._subject.model_name)
        how = f"KEY={key}" if key else "KEY=...   # one of yours; `make keys NAME=app1` makes another"
        return f"""
  API         {self.gateway}/v1
  Prometheus  {self.prometheus}
  Grafana     {self.grafana}   user admin, password in {_short(folder)}/private/grafana_admin_password

{how}
curl {self.gateway}/v1/chat/completions -H "Authorization: Bearer $KEY" -H 'Content-Type: application/json' -d '
{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
"""


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _stop_at(checks: Sequence[Check]) -> None:
    """Raises UpError for a model that the job did not make ready: it is served once the gate has let it pass."""
    for check in checks:
        if check.status == "fail":
            raise UpError(f"the job is done, but {check.name}: {check.found}. {check.fix}")
