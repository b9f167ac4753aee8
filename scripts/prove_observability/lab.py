"""The processes of a proof: real engine, gateway, exporters, Prometheus and Alertmanager, on free ports of loopback.

Each runs under scripts._guard, so nothing of it outlives the proof. What a fault does to them is here as verbs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
import psutil
import yaml

from scripts import _ports, demo, model_fetch
from scripts.prove_observability import config
from scripts.prove_observability.prom import Alertmanager, Prometheus, until
from scripts.prove_observability.receiver import Page, Receiver

SHIPPED = Path("configs/prometheus/prometheus.yml")
SHIPPED_ALERTMANAGER = Path("configs/alertmanager/alertmanager.yml")
DCGM_PAGE = Path("tests/fixtures/scrapes/derived-dcgm.prom")
START_S = 300
# Little enough that a dozen long answers are one too many.
ROOM = {"GATEWAY__ADMISSION__CAPACITY_TOKENS": "4000", "GATEWAY__ADMISSION__MAX_QUEUE_TOKENS": "500"}
# Job of prometheus.yml -> what plays it here.
JOBS = {name: name for name in ("engine", "gateway", "prometheus", "alertmanager")}
JOBS |= {"node-exporter": "node", "gpu-exporter": "gpu"}


class LabError(Exception):
    """Something needed is not there, or ended by itself; one line."""


@dataclass
class Running:
    """A started process: its guard, and where its output goes."""

    guard: subprocess.Popen[bytes]
    log: Path
    pump: Pump | None = None

    def main(self) -> psutil.Process | None:
        """The program itself, the guard's child."""
        with contextlib.suppress(psutil.Error):
            return next(iter(psutil.Process(self.guard.pid).children()), None)
        return None


class Pump(threading.Thread):
    """Copies a pipe into a file; while paused nobody reads the pipe."""

    def __init__(self, source: IO[bytes], sink: Path) -> None:
        super().__init__(daemon=True, name=f"pump {sink.name}")
        self._source, self._sink = source, sink
        self.reading = threading.Event()
        self.reading.set()
        self.start()

    def run(self) -> None:
        with self._sink.open("ab", buffering=0) as sink:
            while self.reading.wait() and (data := os.read(self._source.fileno(), 4096)):
                sink.write(data)


@dataclass
class Lab:
    """Everything that runs. `scale`: of the rules' windows; `interval_s`: of the scrapes."""

    folder: Path
    scale: float
    interval_s: int = 1
    ports: dict[str, int] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    engine_flags: tuple[str, ...] = ()
    struck_at: float = 0  # monotonic: the last kill or freeze, for faults that take a while to return from it

    def __post_init__(self) -> None:
        names = ("engine", "gateway", "admin", "prometheus", "alertmanager", "node")
        self.ports |= {name: _ports.free_port() for name in names}
        self.receiver = Receiver()
        self.gpu = Page(DCGM_PAGE.read_text(encoding="utf-8"))
        self.ports["gpu"] = self.gpu.port
        self.prometheus = Prometheus(self.url("prometheus"))
        self.alertmanager = Alertmanager(self.url("alertmanager"))
        self.shipped = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))
        self.model = model_fetch.model_dir()
        self.keys_file = self.folder / "keys" / "keys.json"
        self.disk = self.folder / "disk"

    def url(self, name: str) -> str:
        return f"http://{_ports.HOST}:{self.ports[name]}"

    # Starting and stopping ------------------------------------------------------------------------------------------

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None, *, pipe: bool = False
    ) -> None:
        """Starts one process under the guard; its output goes to <name>.log, through a pipe of ours if `pipe`."""
        guard = (sys.executable, "-m", "scripts._guard", "--parent", str(os.getpid()), "--", *command)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("GATEWAY_", "VLLM_"))}
        log = self.folder / f"{name}.log"
        with log.open("ab") as sink:
            process = subprocess.Popen(
                guard,
                env={**inherited, "PYTHONUNBUFFERED": "1", **(env or {})},
                cwd=demo.ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else sink,
                stderr=subprocess.STDOUT,
            )
        pump = Pump(process.stdout, log) if process.stdout is not None else None
        self.running[name] = Running(process, log, pump)

    def stop(self, name: str) -> None:
        """Ends it politely, and waits until nothing of it is left."""
        running = self.running.pop(name, None)
        if running is None:
            return
        if running.pump is not None:
            running.pump.reading.set()
        running.guard.terminate()
        running.guard.wait(30)

    def kill(self, name: str) -> None:
        """SIGKILL to the program, as the kernel would for want of memory; the guard clears up after it."""
        main = self.running[name].main()
        self.struck_at = time.monotonic()
        if main is not None:
            main.kill()
        self.running.pop(name).guard.wait(30)

    def close(self) -> None:
        for name in list(self.running):
            self.stop(name)
        self.receiver.close()
        self.gpu.close()

    def alive(self) -> None:
        """Raises LabError when something ended by itself."""
        for name, running in self.running.items():
            if (code := running.guard.poll()) is not None:
                lines = running.log.read_text(errors="replace").splitlines()[-5:]
                raise LabError(f"{name} ended with {code}: {' | '.join(lines)}")

    # The services ---------------------------------------------------------------------------------------------------

    def engine(self, *flags: str) -> None:
        """Starts the real engine with the demo's profile, and more flags."""
        service = demo.plan(self._demo_ports(), self.model, None).services[0]
        self.start("engine", (*service.command, *flags), service.env)
        self.engine_flags = flags

    def engine_with(self, *flags: str) -> None:
        """The engine restarted with these flags, unless it runs with them; returns when it answers."""
        if self.engine_flags != flags:
            self.stop("engine")
            self.engine(*flags)
        self.engine_up()

    def engine_up(self) -> None:
        def up() -> bool:
            self.alive()
            return _answers(self.url("engine") + "/health")

        until(up, "an engine that answers", START_S)

    def gateway(self, **settings: str) -> None:
        """The real gateway with keys and a ledger; settings by their environment names without the prefix."""
        service = demo.plan(self._demo_ports(), self.model, None).services[1]
        env = {key: value for key, value in service.env.items() if key != "GATEWAY__AUTH__DISABLED"}
        env |= {
            "GATEWAY__AUTH__KEYS_FILE": str(self.keys_file),
            "GATEWAY__LEDGER__PATH": str(self.disk / "usage.sqlite"),
        }
        env |= ROOM
        env |= {f"GATEWAY__{name}": value for name, value in settings.items()}
        self.start("gateway", service.command, env, pipe=True)

    def gateway_ready(self) -> None:
        def ready() -> bool:
            self.alive()
            return _answers(self.url("gateway") + "/readyz")

        until(ready, "a ready gateway", START_S)

    def _demo_ports(self) -> demo.Ports:
        return demo.Ports(self.ports["gateway"], self.ports["admin"], self.ports["engine"])

    def add_key(self, name: str, *limits: str) -> None:
        """A key by `make keys`' own script."""
        self.keys_file.parent.mkdir(exist_ok=True)
        command = (sys.executable, "-m", "scripts.keys", "add", name, "--file", str(self.keys_file), *limits)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        self.keys[name] = done.stdout.strip().splitlines()[-1]

    def monitoring(self) -> None:
        """Node exporter, Prometheus and Alertmanager, configured as shipped."""
        (self.folder / "targets").mkdir()
        for target in JOBS.values():
            self.target(target, self.ports["admin" if target == "gateway" else target])
        self.node()
        scale = ("--window-scale", str(self.scale), "--scrape-interval", f"{self.interval_s}s")
        rules = (sys.executable, "-m", "scripts.rules", "--out", str(self.folder / "rules"), *scale)
        done = subprocess.run(rules, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LabError(f"the rules could not be written: {done.stderr.strip()}")
        self.configure()
        alerts = config.alertmanager(yaml.safe_load(SHIPPED_ALERTMANAGER.read_text()), self.receiver.url)
        path = self.folder / "alertmanager.yml"
        path.write_text(yaml.safe_dump(alerts), encoding="utf-8")
        data = ("--storage.path", str(self.folder / "alertmanager"), "--cluster.listen-address=")
        where = ("--web.listen-address", f"{_ports.HOST}:{self.ports['alertmanager']}")
        self.start("alertmanager", (program("alertmanager"), "--config.file", str(path), *data, *where))
        store = ("--storage.tsdb.path", str(self.folder / "prometheus"), "--web.enable-lifecycle")
        listen = ("--web.listen-address", f"{_ports.HOST}:{self.ports['prometheus']}", "--log.level", "warn")
        command = (program("prometheus"), "--config.file", str(self.folder / "prometheus.yml"), *store, *listen)
        self.start("prometheus", (*command, "--rules.alert.resend-delay", "1s"))
        until(lambda: self.prometheus.ready() and self.alertmanager.ready(), "Prometheus and Alertmanager", 60)

    def configure(self, change: Mapping[str, object] | None = None) -> None:
        """Writes prometheus.yml; `change` replaces top-level parts."""
        made = config.prometheus(
            self.shipped,
            JOBS,
            interval=f"{self.interval_s}s",
            alertmanager=f"{_ports.HOST}:{self.ports['alertmanager']}",
        )
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump({**made, **(change or {})}), encoding="utf-8")

    @property
    def unshipped_jobs(self) -> tuple[str, ...]:
        return config.unshipped(self.shipped, JOBS)

    def configured(self) -> dict[str, object]:
        """prometheus.yml as it is now."""
        found: dict[str, object] = yaml.safe_load((self.folder / "prometheus.yml").read_text(encoding="utf-8"))
        return found

    def target(self, name: str, port: int | None) -> None:
        """Where a target is found, or that it is not there; Prometheus sees the change within seconds."""
        path = self.folder / "targets" / f"{name}.json"
        labels = {"__meta_dns_name": name}  # as if the network's name service had found it
        groups = [{"targets": [f"{_ports.HOST}:{port}"], "labels": labels}] if port else []
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(groups), encoding="utf-8")
        fresh.rename(path)

    def node(self, procfs: Path | None = None) -> None:
        """The node exporter, reading /proc or a copy of it."""
        collectors = [f"--collector.{name}" for name in ("filesystem", "meminfo", "vmstat", "cpu", "loadavg")]
        where = f"--web.listen-address={_ports.HOST}:{self.ports['node']}"
        command = (program("node-exporter"), "--collector.disable-defaults", *collectors, where)
        self.start("node", (*command, *((f"--path.procfs={procfs}",) if procfs else ())))

    # What faults need -----------------------------------------------------------------------------------------------

    def engine_core(self) -> list[psutil.Process]:
        """The process that computes, beside the one that answers."""
        tree = psutil.Process(self.running["engine"].guard.pid).children(recursive=True)
        return [process for process in tree if "EngineCore" in " ".join(process.cmdline() or [process.name()])]

    def freeze(self, *, on: bool) -> None:
        """Stops the engine's computing process, or lets it go on."""
        self.struck_at = time.monotonic() if on else self.struck_at
        for process in self.engine_core():
            process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)


def program(name: str) -> str:
    """Prometheus, Alertmanager or the node exporter, as Debian or upstream call them. Raises LabError."""
    for spelling in (name, f"prometheus-{name}", name.replace("-", "_")):
        if found := shutil.which(spelling):
            return found
    raise LabError(
        f"{name} is not installed: apt-get install prometheus prometheus-alertmanager prometheus-node-exporter"
    )


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
