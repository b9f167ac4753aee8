"""The pinned engine, serving one model for as long as it is measured: on this machine or in its container.

Whoever ends first takes it along: the engine's process tree runs under scripts._guard.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx

from scripts import _ports
from scripts.quantization.gate_config import Engine
from scripts.quantization.scoring import NAME

ROOT = Path(__file__).parents[2]
CONTAINER = "vllm-stack-gate"
OVERRIDE = "docker/gate.yaml"
_LOOK_S = 0.5


class EngineError(Exception):
    """The engine did not come up; the message is its own last word on it."""


@dataclass(frozen=True)
class Launch:
    """What is run: `environ` lies over ours; `tidy` is run before and after, and may fail."""

    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = 10
    tidy: tuple[tuple[str, ...], ...] = ()


class Launcher(Protocol):
    def launch(self, model: Path, port: int, listed: int, engine: Engine) -> Launch:
        """The command that serves `model` on 127.0.0.1:`port`, telling up to `listed` log probabilities. Pure."""
        ...


@dataclass(frozen=True)
class Local:
    """`vllm serve` of an environment on this machine. kind: cpu or gpu, whose arguments it takes."""

    program: Path = ROOT / ".venv-engine/bin/vllm"
    kind: str = "cpu"
    more: tuple[str, ...] = ()

    def launch(self, model: Path, port: int, listed: int, engine: Engine) -> Launch:
        arguments = _arguments(str(model), _ports.HOST, port, listed, engine, self.kind)
        return Launch((str(self.program), *arguments, *self.more), {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})


@dataclass(frozen=True)
class ComposeRun:
    """The stack's engine image, started apart from the stack: `docker compose run` with the model bound into it."""

    service: str = "engine"  # or engine-cpu
    files: str = "compose.yaml"  # what COMPOSE_FILE says without us
    more: tuple[str, ...] = ()

    def launch(self, model: Path, port: int, listed: int, engine: Engine) -> Launch:
        bound, inside = mount(model)
        kind = "cpu" if self.service == "engine-cpu" else "gpu"
        arguments = _arguments(f"/gate/{inside}".rstrip("/"), "0.0.0.0", 8000, listed, engine, kind)  # noqa: S104
        run = ("--rm", "--no-deps", "--no-TTY", "--quiet-pull", "--name", CONTAINER)
        publish = ("--publish", f"{_ports.HOST}:{port}:8000", "--volume", f"{bound}:/gate:ro", "--entrypoint", "vllm")
        command = ("docker", "compose", "--profile", kind, "run", *run, *publish, self.service, *arguments, *self.more)
        return Launch(
            command,
            # compose.yaml wants a profile named; the gate's own arguments are what counts.
            {"ENGINE_PROFILE": "gate", "COMPOSE_FILE": f"{self.files}:{OVERRIDE}"},
            grace_s=60,  # the container ends first, or it would be left
            tidy=(("docker", "rm", "--force", CONTAINER), ("docker", "network", "rm", CONTAINER)),
        )


def mount(model: Path) -> tuple[Path, str]:
    """(directory to bind, path of the model in it). A hub cache's snapshot holds links into its own repository."""
    model = model.resolve()
    if model.parent.name == "snapshots":
        return model.parents[1], f"snapshots/{model.name}"
    return model, ""


def _arguments(model: str, host: str, port: int, listed: int, engine: Engine, kind: str) -> tuple[str, ...]:
    found = ["serve", model, "--served-model-name", NAME, "--host", host, "--port", str(port)]
    found += ["--max-model-len", str(engine.max_model_len), "--max-logprobs", str(listed)]
    for name, value in (engine.cpu if kind == "cpu" else engine.gpu).items():
        if value is True:
            found.append(f"--{name}")
        elif value is not False:
            found += [f"--{name}", str(value)]
    return tuple(found)


@contextlib.contextmanager
def serving(launcher: Launcher, model: Path, listed: int, engine: Engine, say: Callable[[str], None]) -> Iterator[str]:
    """Its base URL, once it answers. Raises EngineError; nothing of it runs afterwards, however the block ended."""
    port = _ports.free_port()
    launch = launcher.launch(model, port, listed, engine)
    guard = (sys.executable, "-m", "scripts._guard", "--parent", str(os.getpid()), "--grace", str(launch.grace_s), "--")
    _tidy(launch)
    with tempfile.NamedTemporaryFile(prefix="gate-engine-", suffix=".log") as log:
        try:
            process = subprocess.Popen(
                (*guard, *launch.command),
                env={**os.environ, **launch.environ},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise EngineError(f"{launch.command[0]}: {error.strerror}") from error
        try:
            url = f"http://{_ports.HOST}:{port}"
            _await(url, process, Path(log.name), engine.start_s, say)
            try:
                yield url
            except Exception as error:
                if process.poll() is not None:  # then that is the cause, and the exception only what it looked like
                    raise EngineError(f"the engine ended while it was asked: {cause(_read(Path(log.name)))}") from error
                raise
        finally:
            process.terminate()
            process.wait(launch.grace_s + 20)
            _tidy(launch)


def _await(url: str, process: subprocess.Popen[bytes], log: Path, limit_s: float, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    with httpx.Client(base_url=url, timeout=2, trust_env=False) as client:
        while True:
            if process.poll() is not None:
                raise EngineError(f"the engine did not start: {cause(_read(log))}")
            with contextlib.suppress(httpx.HTTPError):
                if client.get("/health").status_code == 200:
                    return
            waited = time.monotonic() - began
            if waited > limit_s:
                raise EngineError(f"the engine did not answer within {limit_s:.0f} s (engine.start_s)")
            say(f"the engine starts ({waited:.0f} s)")
            time.sleep(_LOOK_S)


def _tidy(launch: Launch) -> None:
    """A container of an earlier gate that was killed with everything around it."""
    for command in launch.tidy:
        with contextlib.suppress(OSError):
            subprocess.run(command, capture_output=True, check=False)


def _read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def cause(log: str) -> str:
    """The line of an engine's log that says why it ended."""
    lines = [re.sub(r"^\([\w =]+\)\s*", "", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if line]
    if "No space left on device" in log:
        return "no space left on the disk"
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b: ", line) or "error: " in line[:60]]
    specific = [line for line in errors if "See root cause above" not in line and "Engine core init" not in line]
    return (specific or errors or lines[-1:] or ["it said nothing"])[-1][:400]
