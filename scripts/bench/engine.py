"""An engine, and a gateway in front of it, of our own: started for one entry of a plan, gone with it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from scripts import _ports

ROOT = Path(__file__).parent.parent.parent
VLLM = ("-m", "vllm.entrypoints.cli.main")  # `vllm`, where its program is not on PATH
_ERROR = re.compile(r"^(?:\(\w+[^)]*\) )?(?:ERROR [\d: -]+\[[^\]]+\] )?(\w*(?:Error|Exception)\b.*|.*\berror: .*)$")


class StartError(Exception):
    """A process did not come up; the message is one line with its own reason."""


@dataclass(frozen=True)
class Target:
    """What a measurement talks to: base URLs without a slash at the end. `gateway` is None where there is none."""

    engine: str
    model: str  # as served
    max_model_len: int
    gateway: str | None = None
    api_key: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)  # version and labels of vllm:cache_config_info


@dataclass(frozen=True)
class Launcher:
    """How an engine is started: `python`'s own vLLM, or, with `image`, that image in Docker with all GPUs."""

    python: str
    image: str | None = None

    def command(
        self, model: str, arguments: Sequence[str], environment: Mapping[str, str], name: str
    ) -> tuple[list[str], dict[str, str]]:
        """The command up to the address to listen at, and what it needs in its environment."""
        known = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **environment}
        if self.image is None:
            return [self.python, *VLLM, "serve", model, *arguments], known
        variables = [part for variable in known.items() for part in ("--env", "=".join(variable))]
        docker = ["docker", "run", "--rm", "--init", "--name", name, "--network", "host", "--gpus", "all"]
        docker += ["--shm-size", "2g", *variables, "--volume", f"{Path(model).resolve()}:/model:ro"]
        return [*docker, self.image, "/model", *arguments], {}


@contextlib.contextmanager
def starting(
    launcher: Launcher,
    model: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    start_s: float,
) -> Iterator[Callable[[], str]]:
    """`vllm serve` under the guard that leaves nothing behind. Yields a function that waits until it answers and
    returns its URL, or raises StartError, or OSError where its log takes no more.
    """
    port = _ports.free_port()
    name = f"vllm-stack-bench-{port}"
    command, variables = launcher.command(model, arguments, environment, name)
    try:
        with _guarded([*command, "--host", _ports.HOST, "--port", str(port)], variables, log) as process:
            url = f"http://{_ports.HOST}:{port}"

            def up() -> str:
                _until(f"{url}/health", process, log, start_s)
                return url

            yield up
    finally:
        if launcher.image:  # its client's death is not the container's
            subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=False)


@contextlib.contextmanager
def gateway(engine: str, settings: Mapping[str, str], *, log: Path, start_s: float = 120) -> Iterator[str]:
    """The gateway as it ships, apart from `settings`, in front of one engine; yields its URL once it is ready."""
    port, admin = _ports.free_port(), _ports.free_port()
    environment = {
        "GATEWAY_CONFIG": str(ROOT / "configs/gateway.yaml"),
        "GATEWAY__LISTEN": f"{_ports.HOST}:{port}",
        "GATEWAY__ADMIN_LISTEN": f"{_ports.HOST}:{admin}",
        "GATEWAY__ENGINES": json.dumps([engine]),
        "GATEWAY__AUTH__DISABLED": "true",
        **settings,
    }
    with _guarded([sys.executable, "-m", "gateway"], environment, log) as process:
        url = f"http://{_ports.HOST}:{port}"
        _until(f"{url}/readyz", process, log, start_s)
        yield url


def look(engine: str, gateway: str | None = None, api_key: str = "") -> Target:
    """What serves at `engine`, as it says itself. Raises StartError where it is no vLLM with metrics."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(timeout=10, headers=headers) as client:
            model = client.get(f"{engine}/v1/models").raise_for_status().json()["data"][0]
            version = client.get(f"{engine}/version").raise_for_status().json()["version"]
            page = client.get(f"{engine}/metrics").raise_for_status().text
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise StartError(f"{engine} does not answer as a vLLM server does: {error or type(error).__name__}") from error
    found = re.search(r"^vllm:cache_config_info\{(.*)\} ", page, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1])) if found else {}
    wanted = ("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "num_gpu_blocks")
    facts = {name: labels[name] for name in (*wanted, "kv_cache_size_tokens") if name in labels}
    return Target(engine, model["id"], int(model["max_model_len"]), gateway, api_key, {"version": version, **facts})


@contextlib.contextmanager
def _guarded(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    log.parent.mkdir(parents=True, exist_ok=True)
    guard = [sys.executable, "-m", "scripts._guard", "--parent", str(os.getpid()), "--", *command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            guard,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Nothing ends the guard with us: it is what ends the others, and it watches us.
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _until(url: str, process: subprocess.Popen[bytes], log: Path, start_s: float) -> None:
    until = time.monotonic() + start_s
    while time.monotonic() < until:
        if process.poll() is not None:
            raise _ended(process.returncode, log)
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.25)
    raise StartError(f"not up after {start_s:.0f} s: {log}")


def _ended(code: int, log: Path) -> Exception:
    """Why a process ended at its start; what ends because its log takes no more is the disk's failure, not its own."""
    said = log.read_text(errors="replace")
    why = reason(said)
    if not why and not shutil.disk_usage(log.parent).free:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(log))
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "without a word")
    return StartError(why or f"ended with code {code}: {last[:300]} ({log})")


def reason(log: str) -> str:
    """The line of an engine's log that names the cause: the first error that is not the news of another's death."""
    for line in log.splitlines():
        match = _ERROR.match(line.strip())
        if match and "Engine core initialization failed" not in line:
            return match[1][:300]
    return ""


def arguments(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """A profile's flags as arguments of `vllm serve`; model, host and port are the caller's."""
    given: list[str] = []
    for name, value in flags.items():
        if name not in ("model", "host", "port"):
            given += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return tuple(given)
