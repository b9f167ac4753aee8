"""A fresh copy of the project with settings of its own, and its stack as a user would run it: by `make`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from scripts import _ports, model_fetch
from scripts.up import cpu_env_file

ROOT = Path(__file__).parents[2]
OVERRIDE = "compose.yaml:tests/stack/override.yaml"
MODEL = model_fetch.NAME
# Longer than the profile's 2048, for a prompt whose prefill takes tens of seconds.
MAX_MODEL_LEN = 8192
OLDER_VENV = ROOT / ".venv-engine-0.31.0"  # tests/stack/engines.py fills it


@dataclass
class Stack:
    """`env` lies over the machine's environment in every command. `key` is known once `make up-cpu` has made it."""

    root: Path
    env: Mapping[str, str]
    ports: Mapping[str, int]
    key: str = ""
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=300, trust_env=False))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['GATEWAY_PORT']}"

    def make(self, *arguments: str, timeout_s: float = 900, **env: str) -> subprocess.CompletedProcess[str]:
        return self._run(["make", "--no-print-directory", *arguments], timeout_s, env)

    def compose(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run(["docker", "compose", "--profile", "*", *arguments], 300, {})

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Any command in the project's directory, for what is not done by `make`."""
        return self._run(command, 600, env)

    def docker(self, *arguments: str, text: str | None = None) -> str:
        done = self._run(["docker", *arguments], 120, {}, text)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ready(self) -> bool:
        """Whether the gateway has an engine to ask; False, too, while it starts."""
        try:
            return self.http.get(f"{self.url}/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def inspect(self, service: str) -> Any:
        """What Docker says of a service's container."""
        (identity,) = self.compose("ps", "--all", "--quiet", service).stdout.split()
        return json.loads(self.docker("inspect", identity))[0]

    def python(self, service: str, source: str) -> str:
        """Runs Python inside a service's container, as its user."""
        program = "python3" if service.startswith("engine") else "python"
        done = self.compose("exec", "-T", service, program, "-c", source)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def signal(self, service: str, title: str, number: int) -> list[int]:
        """Sends a signal, from inside, to every process of a container whose command line holds `title`."""
        found = self.python(service, _SIGNAL.format(title=title.encode(), number=number))
        return [int(pid) for pid in found.split()]

    def chat(self, text: str = "Say hello.", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 16, **fields}
        return self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=self.headers)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def logs(self, service: str) -> str:
        return self.compose("logs", "--no-color", "--no-log-prefix", service).stdout

    def _run(
        self, command: Sequence[str], timeout_s: float, env: Mapping[str, str], text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.root,
            env={**_outside_make(), **self.env, **env},
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )


def _outside_make() -> dict[str, str]:
    """This process's environment without what `make test-stack ARGS=...` hands down: it is not meant for others."""
    return {name: value for name, value in os.environ.items() if name not in _MAKES_OWN}


_MAKES_OWN = {"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "ARGS"}

# The first process is the container's init, and this one is not meant either.
_SIGNAL = """
import os
for pid in sorted(int(name) for name in os.listdir('/proc') if name.isdigit()):
    try:
        line = open(f'/proc/{{pid}}/cmdline', 'rb').read().replace(b'\\0', b' ')
    except OSError:
        continue
    if {title!r} in line and pid not in (1, os.getpid()) and b'import os' not in line:
        os.kill(pid, {number})
        print(pid)
"""


def make(folder: Path, project: str, docker_env: Mapping[str, str]) -> Stack:
    """Everything git would hand out, with the environments linked and a .env for free ports. Nothing is started."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        source = ROOT / name
        if source.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    for name in (".venv", ".venv-engine"):
        (folder / name).symlink_to(ROOT / name)
    names = ("GATEWAY_PORT", "PROMETHEUS_PORT", "ALERTMANAGER_PORT", "GRAFANA_PORT", "HTTP_PORT", "HTTPS_PORT")
    ports = {name: _ports.free_port() for name in names}
    settings = {
        **{name: str(port) for name, port in ports.items()},
        "MODELS_DIR": "./models",  # empty: `make up-cpu` fills it
        "ENGINE_ARGS": f"--max-model-len {MAX_MODEL_LEN}",
        "ENGINE_MEMORY": "8g",
    }
    example = cpu_env_file((folder / ".env.example").read_text(encoding="utf-8"))
    example = example.replace("COMPOSE_PROFILES=cpu\n", "COMPOSE_PROFILES=cpu,tls\n")
    lines = "".join(f"{name}={value}\n" for name, value in settings.items())
    (folder / ".env").write_text(example + lines, encoding="utf-8")
    OLDER_VENV.mkdir(exist_ok=True)  # compose binds it, whether a test needs it or not
    env = {
        **docker_env,
        "COMPOSE_FILE": OVERRIDE,
        "COMPOSE_PROJECT_NAME": project,
        "TEST_ENGINE_VENV": str(ROOT / ".venv-engine"),
        "TEST_ENGINE_PYTHON": sys.base_prefix,
        "TEST_OLDER_VENV": str(OLDER_VENV),
        "TEST_QUANTIZE_VENV": str(ROOT / ".venv-quantize"),
    }
    return Stack(folder, env, ports)


def until(condition: Callable[[], object], what: str, limit_s: float) -> float:
    """Polls; seconds it took. A condition that never holds fails the test by name."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, f"not seen within {limit_s} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - began
