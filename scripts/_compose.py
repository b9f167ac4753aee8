"""The stack as Docker sees it: `docker compose` with this project's files, and what its containers say."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
JOBS = ("quantize", "quantize-cpu")  # services that end


class ComposeError(Exception):
    """A docker command failed; the message is what it said."""


@dataclass(frozen=True)
class Container:
    """One container of the stack. `said`: the health check's last word; `code`: the exit code where it ended."""

    id: str
    service: str
    state: str
    health: str
    said: str
    code: int
    restarts: int
    image: str
    image_id: str
    env: Mapping[str, str]

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def done(self) -> bool:
        """A job that ended as it should: compose.yaml restarts everything that is none."""
        return self.service in JOBS and self.state == "exited" and self.code == 0

    @property
    def well(self) -> bool:
        """Running, and healthy where it has a health check; or a job that is done."""
        return self.done or (self.running and self.health in ("healthy", ""))


class Compose:
    """Without profiles: all of them, for commands that are about whatever is there."""

    def __init__(self, profiles: Sequence[str] = ("*",), env: Mapping[str, str] | None = None) -> None:
        self.profiles = tuple(profiles)
        self.env = dict(env or {})

    def command(self, *arguments: str) -> list[str]:
        return ["docker", "compose", *(part for name in self.profiles for part in ("--profile", name)), *arguments]

    def run(self, *arguments: str) -> str:
        """Its stdout. Raises ComposeError with the lines of its stderr that say why."""
        done = self._run(self.command(*arguments))
        if done.returncode != 0:
            raise ComposeError(reason(done.stderr) or f"docker compose {arguments[0]}: exit code {done.returncode}")
        return done.stdout

    def show(self, *arguments: str) -> None:
        """Runs it with its own output on the terminal: it draws progress better. Raises ComposeError."""
        code = subprocess.run(self.command(*arguments), cwd=ROOT, env=os.environ | self.env, check=False).returncode
        if code != 0:
            raise ComposeError(f"docker compose {arguments[0]} failed; its last lines above say why")

    def images(self) -> Images:
        """Raises ComposeError."""
        services = json.loads(self.run("config", "--format", "json"))["services"]
        return plan_images(services, lambda name: self._run([*_INSPECT, name]).returncode == 0)

    def containers(self) -> list[Container]:
        """All of this project, stopped ones too. Raises ComposeError."""
        ids = self.run("ps", "-aq").split()
        if not ids:
            return []
        done = self._run(["docker", "inspect", *ids])
        # A container that went between the two calls is an error on stderr beside the others' answers.
        return sorted(map(_container, json.loads(done.stdout or "[]")), key=lambda found: found.service)

    def tail(self, service: str, lines: int) -> list[str]:
        """The last lines of a service's log, without the program's own decoration."""
        done = self._run(self.command("logs", "--no-color", "--no-log-prefix", "--tail", str(lines), service))
        return [line.replace("\x1b[2K", "").rstrip() for line in done.stdout.splitlines() if line.strip()]

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        env = os.environ | self.env
        try:
            return subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, errors="replace", check=False
            )
        except FileNotFoundError:
            raise ComposeError("docker is not installed: docs.docker.com/engine/install") from None


@dataclass(frozen=True)
class Images:
    """What to build and pull for the chosen profiles; `to_build`, `to_pull`: those that are not on this machine."""

    services: tuple[str, ...]
    built_services: tuple[str, ...]
    pulled_services: tuple[str, ...]
    to_build: tuple[str, ...]
    to_pull: tuple[str, ...]


_INSPECT = ("docker", "image", "inspect", "--format", "{{.Id}}")


def plan_images(services: Mapping[str, Any], here: Callable[[str], bool]) -> Images:
    """An image that is built here is never pulled. One that took the place of it (an engine of another version, say) is
    never built: it would carry that name and be what our Dockerfile says.
    """
    built = {name for name, each in services.items() if "build" in each and _builds(each)}
    made = {services[name]["image"] for name in built}
    pulled = {name for name, each in services.items() if each["image"] not in made}
    return Images(
        tuple(sorted(services)),
        tuple(sorted(built)),
        tuple(sorted(pulled)),
        tuple(sorted(name for name in made if not here(name))),
        tuple(sorted({name for each in pulled if not here(name := services[each]["image"])})),
    )


def _builds(service: Mapping[str, Any]) -> bool:
    """Whether the image asked for is the one that the service's Dockerfile makes, where compose.yaml says its tag."""
    tags = service["build"].get("tags")
    return not tags or service["image"] in tags


def failure(containers: Sequence[Container]) -> tuple[str, str] | None:
    """The service that will not come up by itself, and why; None while all may still do."""
    for found in containers:
        if found.said.startswith("gave up"):
            return found.service, found.said
        if found.state in ("restarting", "exited", "dead") and found.restarts >= 2:
            return found.service, f"it ended {found.restarts} times, last with exit code {found.code}"
        if found.state in ("exited", "dead") and not found.restarts and not found.done:
            return found.service, f"it ended with exit code {found.code}"
    return None


def reason(stderr: str) -> str:
    """What a docker command's stderr says went wrong: its progress lines are dropped."""
    if "unknown flag: --profile" in stderr or "is not a docker command" in stderr:
        return "docker has no Compose here: docs.docker.com/compose/install"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "failed", "validating", "invalid"))]
    return "; ".join(errors or lines[-1:])


def _container(found: Mapping[str, Any]) -> Container:
    state, config = found["State"], found["Config"]
    health = state.get("Health") or {}
    log = health.get("Log") or [{}]
    return Container(
        id=found["Id"],
        service=config["Labels"].get("com.docker.compose.service", ""),
        state=state["Status"],
        health=health.get("Status", ""),
        said=str(log[-1].get("Output", "")).strip(),
        code=state["ExitCode"],
        restarts=found["RestartCount"],
        image=config["Image"],
        image_id=found["Image"],
        env=dict(_pairs(config.get("Env") or [])),
    )


def _pairs(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        with suppress(ValueError):
            name, value = line.split("=", 1)
            yield name, value
