"""A live stack for the preview: the real engine on the CPU, the gateway with keys, Prometheus with the rules."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from scripts import _ports, _prometheus, demo, model_fetch
from scripts.dashboards import _load, _recorded

START_S = 600
SCRAPE = "5s"


class StageError(Exception):
    """The stack can't be had; the message is one line for the user."""


@dataclass(frozen=True)
class Recording:
    """What the pictures show: from when to when, in seconds since 1970, and what a reader has to know about it."""

    start: float
    end: float
    note: str


def record(folder: Path, seconds: float) -> Recording:
    """Runs the stack under load and leaves Prometheus's data in folder/data. Raises StageError.

    Scraped as well: a node exporter where one is installed, and a recorded card in a real one's place.
    """
    model = model_fetch.model_dir()
    if model_fetch.plan(model).fetch:
        raise StageError(f"the model is not in {model}: make model")
    folder.mkdir(parents=True, exist_ok=True)
    ports = demo.Ports(_ports.free_port(), _ports.free_port(), _ports.free_port(), _ports.free_port())
    keys = _keys(folder / "keys.json")
    with contextlib.ExitStack() as stack:
        began = time.time()
        jobs = {"engine": f"{_ports.HOST}:{ports.engine}", "gateway": f"{_ports.HOST}:{ports.admin}"}
        card, jobs["gpu"] = stack.enter_context(_recorded.exporter())
        if program := shutil.which("prometheus-node-exporter") or shutil.which("node_exporter"):
            jobs["node"] = f"{_ports.HOST}:{_ports.free_port()}"
            command = (program, f"--web.listen-address={jobs['node']}")
            stack.enter_context(_guarded(command, {}, folder / "node.log"))
        stack.enter_context(prometheus(folder, ports.prometheus or 0, jobs))
        running = {}
        for service in demo.plan(ports, model, None).services:
            env = dict(service.env)
            if service.name == "gateway":
                env["GATEWAY__AUTH__DISABLED"] = "false"
                env["GATEWAY__AUTH__KEYS_FILE"] = str(folder / "keys.json")
                env["GATEWAY__LEDGER__PATH"] = str(folder / "usage.sqlite")
            running[service.name] = stack.enter_context(_guarded(service.command, env, folder / f"{service.name}.log"))
        url = f"http://{_ports.HOST}:{ports.gateway}"
        _wait(f"{url}/readyz", running, folder)
        with contextlib.suppress(TimeoutError):
            asyncio.run(_load.run(url, demo.MODEL, keys, seconds))
        note = (
            f"Live: engine on the CPU, gateway, host. Recorded: the GPU row, an {card} under another load, "
            "so that its tokens for a joule mean nothing here."
        )
        return Recording(max(began, time.time() - seconds - 60), time.time(), note)


@contextlib.contextmanager
def prometheus(folder: Path, port: int, jobs: Mapping[str, str]) -> Iterator[str]:
    """Prometheus on folder/data, scraping `jobs`; yields its address once it answers."""
    try:
        program = _prometheus.find(model_fetch.model_dir().parent.parent)
    except _prometheus.MissingError as error:
        raise StageError(f"no Prometheus: {error}") from error
    source = yaml.safe_load(_prometheus.CONFIG.read_text(encoding="utf-8"))
    filled = _prometheus.configuration(source, jobs, SCRAPE)
    filled["global"]["scrape_timeout"] = "4s"
    filled.pop("alerting", None)  # nobody is to be told
    filled["rule_files"] = [str((_prometheus.CONFIG.parent / one).resolve()) for one in source.get("rule_files", ())]
    known = {job["job_name"] for job in filled["scrape_configs"]}
    filled["scrape_configs"] += [
        {"job_name": name, "static_configs": [{"targets": [target]}]}
        for name, target in jobs.items()
        if name not in known
    ]
    if not jobs:  # a replay: what was recorded is to stay as it was
        filled["rule_files"] = []
    (folder / "prometheus.yml").write_text(yaml.safe_dump(filled), encoding="utf-8")
    data = ("--config.file", str(folder / "prometheus.yml"), "--storage.tsdb.path", str(folder / "data"))
    listen = ("--web.listen-address", f"{_ports.HOST}:{port}", "--log.level", "warn")
    url = f"http://{_ports.HOST}:{port}"
    with _guarded((str(program), *data, *listen), {}, folder / "prometheus.log") as process:
        _wait(f"{url}/-/ready", {"prometheus": process}, folder)
        yield url


def _keys(file: Path) -> dict[str, str]:
    """A key for each tenant of the load; name -> secret."""
    file.unlink(missing_ok=True)
    env = {**os.environ, "GATEWAY__AUTH__KEYS_FILE": str(file)}
    return {
        name: subprocess.run(
            (sys.executable, "-m", "scripts.keys", "add", name, *limits),
            env=env,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for name, limits in _load.TENANTS.items()
    }


@contextlib.contextmanager
def _guarded(command: tuple[str, ...], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    guard = (sys.executable, "-m", "scripts._guard", "--parent", str(os.getpid()), "--")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            (*guard, *command),
            env={**inherited, **env},
            cwd=demo.ROOT,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def _wait(url: str, running: Mapping[str, subprocess.Popen[bytes]], folder: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        for name, process in running.items():
            if process.poll() is not None:
                last = (folder / f"{name}.log").read_text(errors="replace").strip().splitlines()[-1:]
                raise StageError(f"{name} ended with {process.returncode}: {''.join(last)}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2, trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    raise StageError(f"{url} did not answer within {START_S} s; logs in {folder}")
