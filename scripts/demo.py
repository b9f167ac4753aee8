"""The whole stack on this machine, without Docker: engine, gateway, Prometheus, and a conversation through them.

    python -m scripts.demo [--once] [--port N] [--admin-port N] [--engine-port N] [--prometheus-port N] [--dry-run]

Stays up until Ctrl-C; with --once it ends after the answers. Exit codes: 0 everything answered (and, without --once,
was stopped by Ctrl-C later), 1 something failed (one line says what), 2 wrong usage, 130 or 143 interrupted before.
No process is left behind in any case: each runs under scripts._guard.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from honcho.manager import Manager  # type: ignore[import-untyped]

from scripts import _demo_talk as talk
from scripts import _ports, _prometheus, model_fetch
from scripts._children import Terminated, raise_on_termination
from scripts._command import Parser
from scripts._demo_logs import Logs

ROOT = Path(__file__).parent.parent
PROFILE = "configs/engine/smollm2-135m.cpu.yaml"
MODEL = model_fetch.NAME
RECORD = "ports.json"  # in the run's folder, for `make doctor`
START_S = 600  # a cold disk and a slow processor; everything that fails says so long before


class DemoError(Exception):
    """The demo can't go on; the message is one line for the user."""


@dataclass(frozen=True)
class Ports:
    """Where everything listens, on loopback. `prometheus` None: any free one."""

    gateway: int = 8080
    admin: int = 9000
    engine: int = 8000
    prometheus: int | None = None


@dataclass(frozen=True)
class Service:
    """One process of the demo."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """All that will be started, and where its logs and Prometheus's data go."""

    services: tuple[Service, ...]
    folder: Path
    ports: Ports
    model: str = MODEL

    def url(self, port: int) -> str:
        return f"http://{_ports.HOST}:{port}"


def plan(ports: Ports, model: Path, prometheus: Path | None) -> Plan:
    """Decides commands and environments; touches nothing. `ports.prometheus` is set where `prometheus` is."""
    folder = ROOT / ".demo" / str(ports.gateway)
    host = _ports.HOST
    engine = Service(
        "engine",
        (
            *(str(ROOT / ".venv-engine/bin/vllm"), "serve", str(model), "--config", PROFILE),
            *("--host", host, "--port", str(ports.engine)),
        ),
        {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    )
    gateway = Service(
        "gateway",
        (sys.executable, "-m", "gateway"),
        {
            "GATEWAY_CONFIG": "configs/gateway.yaml",
            "GATEWAY__LISTEN": f"{host}:{ports.gateway}",
            "GATEWAY__ADMIN_LISTEN": f"{host}:{ports.admin}",
            "GATEWAY__ENGINES": json.dumps([f"http://{host}:{ports.engine}"]),
            "GATEWAY__AUTH__DISABLED": "true",  # loopback only, and a newcomer has no key yet
            "GATEWAY__TIMEOUTS__DRAIN_S": "2",  # Ctrl-C means now
        },
    )
    services = [engine, gateway]
    if prometheus is not None:
        data = ("--config.file", str(folder / "prometheus.yml"), "--storage.tsdb.path", str(folder / "prometheus"))
        listen = ("--web.listen-address", f"{host}:{ports.prometheus}", "--log.level", "warn")
        services.append(Service("prometheus", (str(prometheus), *data, *listen), {}))
    return Plan(tuple(services), folder, ports)


def running_ports(root: Path, listens: Callable[[int], bool]) -> Ports:
    """Where a demo of this checkout listens now, the one on the usual ports before others; else the usual ports."""
    records = sorted((root / ".demo").glob(f"*/{RECORD}"), key=lambda path: path.parent.name != str(Ports.gateway))
    for record in records:
        with contextlib.suppress(OSError, ValueError, TypeError):  # half written, or another version's
            found = Ports(**json.loads(record.read_text(encoding="utf-8")))
            if listens(found.gateway):
                return found
    return Ports()


def check_ports(ports: Ports) -> None:
    """Raises DemoError naming every port that is taken, its holder and the way out."""
    wanted = {"--port": ports.gateway, "--admin-port": ports.admin, "--engine-port": ports.engine}
    if ports.prometheus is not None:
        wanted["--prometheus-port"] = ports.prometheus
    taken = {option: port for option, port in wanted.items() if not _ports.is_free(port)}
    if not taken:
        return
    told = ", ".join(f"{port} by {_ports.holder(port)}" for port in taken.values())
    others = _ports.free_above(taken.values(), wanted.values())
    options = " ".join(f"{option} {other}" for option, other in zip(taken, others, strict=True))
    word, them, else_ = ("ports", "them", "other ports") if len(taken) > 1 else ("port", "that", "another port")
    raise DemoError(f"{word} taken: {told}: stop {them}, or choose {else_} with make demo ARGS='{options}'")


def find_prometheus(ports: Ports, terminal: talk.Terminal) -> tuple[Path | None, Ports]:
    """The program and its port; (None, ports) with one line on the terminal where it can't be had."""
    try:
        program = _prometheus.find(model_fetch.model_dir().parent.parent)
    except (_prometheus.MissingError, OSError) as error:
        terminal.line(f"prometheus  goes on without it, so without its figures: {error}")
        return None, ports
    port = ports.prometheus or (9090 if _ports.is_free(9090) else _ports.free_port())
    return program, Ports(ports.gateway, ports.admin, ports.engine, port)


def prepare(chosen: Plan) -> None:
    """Makes the folder, empty but for Prometheus's configuration and the ports. Raises OSError."""
    shutil.rmtree(chosen.folder, ignore_errors=True)  # an earlier run's figures would mix with this one's
    chosen.folder.mkdir(parents=True, exist_ok=True)
    host, ports = _ports.HOST, chosen.ports
    targets = {"engine": f"{host}:{ports.engine}", "gateway": f"{host}:{ports.admin}"}
    _prometheus.write_configuration(chosen.folder / "prometheus.yml", targets)
    (chosen.folder / RECORD).write_text(json.dumps(asdict(ports)), encoding="utf-8")


class Demo:
    """One run: honcho's loop in the main thread, `_drive` beside it. `run` returns the exit code."""

    def __init__(self, chosen: Plan, once: bool, terminal: talk.Terminal) -> None:
        self._plan = chosen
        self._once = once
        self._terminal = terminal
        self._driver = threading.Thread(target=self._drive, name="driver")
        self._logs = Logs(chosen.folder, on_start=self._driver.start)
        self._done = False  # everything answered
        self._problem: str | None = None

    def run(self) -> int:
        """Starts everything, shows it, and returns when nothing runs any more."""
        manager = Manager(self._logs)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
        for service in self._plan.services:
            guarded = (sys.executable, "-m", "scripts._guard", "--parent", str(os.getpid()), "--", *service.command)
            env = {**inherited, "PYTHONUNBUFFERED": "1", **service.env}
            manager.add_process(service.name, "exec " + shlex.join(guarded), env=env, cwd=str(ROOT))
        manager.loop()
        self._driver.join()
        self._terminal.plain()
        if self._problem is not None:
            print(f"demo: {self._problem}", file=sys.stderr)
            return 1
        self._terminal.line(f"stopped{'' if self._done else ' before it had answered'}; nothing is left running")
        if self._done:
            return 0
        return 143 if self._logs.signal == "SIGTERM" else 130

    def _drive(self) -> None:
        try:
            self._show()
            self._done = True
            if not self._once:
                self._terminal.line("everything is up; Ctrl-C stops it")
                self._logs.ended.wait()
        except talk.StoppedError:
            pass
        except (talk.TalkError, httpx.HTTPError) as error:
            # A process that died is the cause, and this only what it looked like from here: give its end time to show.
            if not self._logs.ended.wait(2):
                self._problem = str(error)
        self._problem = self._problem or self._failure()
        # The loop is the main thread's: it stops all of them when told as a shell would.
        os.kill(os.getpid(), signal.SIGTERM)

    def _failure(self) -> str | None:
        """What ended the run by itself, if anything did."""
        logs = self._logs
        if logs.unwritable is not None:
            return logs.unwritable
        if logs.stopped is None or logs.signal is not None:
            return None
        name, code = logs.stopped
        tail = "".join(f"\n    {line}" for line in logs.tail(name))
        cause = f"the {name} stopped (exit code {code}): {logs.why(name, code)}"
        return f"{cause}\n  its last lines, more in {logs.path(name)}:{tail}" if tail else cause

    def _show(self) -> None:
        ports, terminal, ended = self._plan.ports, self._terminal, self._logs.ended
        url = self._plan.url
        base = url(ports.gateway)
        with httpx.Client(timeout=5, trust_env=False) as client:
            terminal.line(f"engine      starts: vLLM 0.32.0 on the CPU, {self._plan.model}")

            def engine_up() -> str | None:
                up, _ = talk.answers(client, url(ports.engine) + "/health")
                return None if up else f"engine: {self._logs.phase}"

            talk.wait(engine_up, terminal, ended, START_S)
            kv_cache = f", KV cache of {self._logs.kv_tokens} tokens" if self._logs.kv_tokens else ""
            terminal.line(f"engine      up on {url(ports.engine)}{kv_cache}")

            def gateway_ready() -> str | None:
                up, reason = talk.answers(client, base + "/readyz")
                return None if up else f"gateway: {reason or 'starting'}"

            talk.wait(gateway_ready, terminal, ended, START_S)
            terminal.line(f"gateway     ready on {base} (metrics on {url(ports.admin)}/metrics)")
            prometheus = None if len(self._plan.services) < 3 else url(ports.prometheus or 0)
            if prometheus is not None:
                talk.wait(lambda: _both_up(client, prometheus), terminal, ended, START_S)
                terminal.line(f"prometheus  ready on {prometheus}, scraping engine and gateway")
            turns = talk.converse(base, self._plan.model, client, terminal, ended)
            generated = sum(turn.generation_tokens for turn in turns)
            found = talk.numbers(client, prometheus, generated, terminal, ended) if prometheus else None
            talk.show(turns, found, terminal)
            terminal.plain(talk.ending(base, self._plan.model, stays=not self._once))


def _both_up(client: httpx.Client, url: str) -> str | None:
    try:
        up = _prometheus.query(client, url, "sum(up)")
    except httpx.HTTPError:
        return "prometheus: starting"
    return None if up == 2 else "prometheus: first scrapes of engine and gateway"


def main(argv: list[str] | None = None) -> int:
    parser = Parser("demo", description="Engine, gateway and Prometheus on this machine, and a conversation.")
    parser.add_argument("--once", action="store_true", help="end after the answers instead of staying up")
    number = _ports.port
    parser.add_argument("--port", type=number, default=Ports.gateway, help="the gateway's (default %(default)s)")
    parser.add_argument("--admin-port", type=number, default=Ports.admin, help="its metrics' (default %(default)s)")
    parser.add_argument("--engine-port", type=number, default=Ports.engine, help="the engine's (default %(default)s)")
    parser.add_argument("--prometheus-port", type=number, help="Prometheus's (default 9090, or a free one)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    args = parser.parse_args(argv)
    terminal = talk.Terminal()
    model = model_fetch.model_dir()
    ports = Ports(args.port, args.admin_port, args.engine_port, args.prometheus_port)
    try:
        check_ports(ports)
        if model_fetch.plan(model).fetch:
            raise DemoError(f"the model is not in {model}: make model")
        program, ports = find_prometheus(ports, terminal)
        chosen = plan(ports, model, program)
        if args.dry_run:
            for service in chosen.services:
                terminal.plain(f"{service.name}: {shlex.join(service.command)}")
            return 0
        prepare(chosen)
        return Demo(chosen, args.once, terminal).run()
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
    except OSError as error:
        print(f"demo: {error.filename or ''}: {error.strerror}", file=sys.stderr)
    except (KeyboardInterrupt, Terminated):
        print("demo: interrupted before anything was started", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    raise_on_termination()
    sys.exit(main())
