"""What is running: ports, the gateway, the engine, versions, Prometheus's targets, where alerts go."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from scripts import demo
from scripts.checks import Check, fail, judged, ok, skip, warn
from scripts.checks.docker import compose_services, engine_image
from scripts.checks.probes import Answer, Probes
from scripts.checks.subject import Subject
from scripts.engine_args.vocabulary import PINNED

HOST = "http://127.0.0.1"
# Service -> what .env calls its ports, and their defaults.
_STACK_PORTS = {
    "gateway": {"GATEWAY_PORT": 8080},
    "prometheus": {"PROMETHEUS_PORT": 9090},
    "alertmanager": {"ALERTMANAGER_PORT": 9093},
    "grafana": {"GRAFANA_PORT": 3000},
}
_TLS_PORTS = {"caddy": {"HTTP_PORT": 80, "HTTPS_PORT": 443}}  # with profile tls


def checks(probes: Probes, subject: Subject) -> list[Check]:
    ports = wanted_ports(probes, subject)
    at = {name: f"{HOST}:{port}" for name, port in ports.items()}
    return [
        *(port(probes, name, number) for name, number in ports.items()),
        healthz(probes, at.get("gateway")),
        readyz(probes, at.get("gateway")),
        *engine(probes, subject, at.get("engine")),
        targets(probes, at.get("prometheus")),
        alert_receiver(probes, at.get("alertmanager")),
    ]


def wanted_ports(probes: Probes, subject: Subject) -> dict[str, int]:
    """Service -> port of this host: what compose publishes, or the project's own numbers.

    A service's second port has its own entry, <service>:<port>.
    """
    if subject.purpose == "demo":
        chosen = demo.running_ports(probes.root, lambda port: probes.port_holder(port) is not None)
        prometheus = {} if chosen.prometheus is None else {"prometheus": chosen.prometheus}
        return {"gateway": chosen.gateway, "gateway-admin": chosen.admin, "engine": chosen.engine, **prometheus}
    published: list[tuple[str, int]] = []
    for name, service in compose_services(probes, subject).items():
        for entry in service.get("ports") or []:
            number = str(entry.get("published", "")) if isinstance(entry, dict) else ""
            if number.isdecimal():
                published.append((name, int(number)))
    if not published:
        known = _STACK_PORTS | (_TLS_PORTS if "tls" in _profiles(subject) else {})
        for name, ports in known.items():
            for variable, usual in ports.items():
                said = subject.environ.get(variable, "")
                published.append((name, int(said) if said.isdecimal() else usual))
    found: dict[str, int] = {}
    for name, port in dict.fromkeys(published):
        found[f"{name}:{port}" if name in found else name] = port
    return found


def service_of(entry: str) -> str:
    """The service of an entry of `wanted_ports`."""
    return entry.partition(":")[0]


def _profiles(subject: Subject) -> list[str]:
    return [part.strip() for part in subject.environ.get("COMPOSE_PROFILES", "").split(",")]


def port(probes: Probes, service: str, number: int) -> Check:
    """Free, or held by this very service. service: an entry of `wanted_ports`."""
    name, service = f"stack.port.{service}", service_of(service)
    expected = f"port {number} free, or held by this stack's {service}"
    holder = probes.port_holder(number)
    if holder is None:
        return ok(name, expected, "free")
    base = f"{HOST}:{number}"
    if _is_ours(probes, service, base):
        return ok(name, expected, f"this stack's {service} ({holder})")
    fix = f"stop {holder}, or choose another port (demo: ARGS='--port N'; stack: .env)"
    return fail(name, expected, f"taken by {holder}", fix)


def _is_ours(probes: Probes, service: str, base: str) -> bool:
    """Whether the server there answers as this service does; one that has no such answer is asked for from compose."""
    if service == "gateway":
        return _json(probes.get(f"{base}/readyz")).get("status") in ("ready", "unready")
    if service == "engine":
        return "version" in _json(probes.get(f"{base}/version"))
    if service == "gateway-admin":
        answer = probes.get(f"{base}/metrics")
        return answer is not None and "gateway_" in answer.text
    if service == "prometheus":
        return _json(probes.get(f"{base}/api/v1/status/buildinfo")).get("status") == "success"
    if service == "alertmanager":
        return "versionInfo" in _json(probes.get(f"{base}/api/v2/status"))
    if service == "grafana":
        return "database" in _json(probes.get(f"{base}/api/health"))
    ran = probes.run(["docker", "compose", "--profile", "*", "ps", "--services", "--status", "running"])
    return ran is not None and ran.code == 0 and service in ran.out.split()


def healthz(probes: Probes, base: str | None) -> Check:
    name, expected = "stack.healthz", f"{base or 'the gateway'}/healthz answers 200"
    answer = probes.get(f"{base}/healthz") if base else None
    if answer is None:
        return skip(name, expected, "no gateway is running")
    fix = "look at its log: make logs"
    return judged(answer.status == 200, name, expected, f"{answer.status}", fix)


def readyz(probes: Probes, base: str | None) -> Check:
    """A gateway that waits for an engine that is still loading is unready too, so this warns."""
    name, expected = "stack.readyz", f"{base or 'the gateway'}/readyz answers 200: an engine makes progress"
    answer = probes.get(f"{base}/readyz") if base else None
    if answer is None:
        return skip(name, expected, "no gateway is running")
    if answer.status == 200:
        return ok(name, expected, "ready")
    reason = _json(answer).get("reason") or answer.text[:120]
    fix = "wait while the engine loads; else look at the engine's log"
    return warn(name, expected, f"{answer.status}: {reason}", fix)


def engine(probes: Probes, subject: Subject, base: str | None) -> list[Check]:
    """Alive, of the pinned version, and with its figures on. Only where its port can be reached from the host."""
    alive, version, figures = "stack.engine", "stack.version", "stack.figures"
    pinned = f"vLLM {PINNED}, as pinned"
    if base is None:
        why = "its port is not published, as it should be; stack.readyz speaks for it"
        return [skip(alive, "the engine is alive", why), _image_version(version, pinned, engine_image(probes, subject))]
    health = probes.get(f"{base}/health")
    if health is None:
        return [skip(alive, f"{base}/health answers 200", "no engine is running")]
    found = [
        judged(
            health.status == 200,
            alive,
            f"{base}/health answers 200",
            f"{health.status}",
            "the engine is dead: restart it and look at its log",
        )
    ]
    said = str(_json(probes.get(f"{base}/version")).get("version") or "")
    if not said:
        found.append(skip(version, pinned, f"{base}/version names none: is that a vLLM?"))
    else:
        fix = f"serve {PINNED}: flags, metrics and dashboards of this project are checked against it"
        found.append(judged(said.split("+")[0] == PINNED, version, pinned, f"vLLM {said}", fix, "warn"))
    page = probes.get(f"{base}/metrics")
    has = page is not None and "\nvllm:" in page.text
    fix = "start it without --disable-log-stats: without figures admission, dashboards and alerts are blind"
    found.append(judged(has, figures, f"vllm: series on {base}/metrics", "there" if has else "none", fix))
    return found


def _image_version(name: str, pinned: str, image: str | None) -> Check:
    """By the image's tag; one that carries no version says nothing."""
    found = re.search(r":v?(\d+\.\d+\.\d+)", image or "")
    if image is None or found is None:
        return skip(name, pinned, f"the engine's image names no version ({image or 'compose names none'})")
    fix = f"serve {PINNED}: flags, metrics and dashboards of this project are checked against it"
    return judged(found[1] == PINNED, name, pinned, image, fix, "warn")


def targets(probes: Probes, base: str | None) -> Check:
    name, expected = "stack.targets", "Prometheus scrapes every target"
    answer = probes.get(f"{base}/api/v1/targets?state=active") if base else None
    if answer is None:
        return skip(name, expected, "no Prometheus answers")
    active = (_json(answer).get("data") or {}).get("activeTargets")
    if not isinstance(active, list):
        return skip(name, expected, f"{base} is no Prometheus")
    down = [f"{t['labels'].get('job')} ({t.get('lastError') or t['health']})" for t in active if t["health"] != "up"]
    return judged(not down, name, expected, ", ".join(down) or f"{len(active)} up", "start what is down", "warn")


def alert_receiver(probes: Probes, base: str | None) -> Check:
    """The configuration in force: an alert that goes nowhere is found out at the worst time."""
    name, expected = "stack.alerts", "Alertmanager's default receiver sends somewhere"
    answer = probes.get(f"{base}/api/v2/status") if base else None
    if answer is None:
        return skip(name, expected, "no Alertmanager answers")
    text = (_json(answer).get("config") or {}).get("original")
    if not isinstance(text, str):
        return skip(name, expected, f"{base} is no Alertmanager")
    receiver, channels = default_receiver(text)
    if receiver is None:
        return skip(name, expected, "its configuration can't be read")
    fix = "set a receiver (mail, Slack, PagerDuty, webhook): until then alerts are only seen by who looks"
    found = (
        f"receiver {receiver!r} sends by {', '.join(channels)}" if channels else f"receiver {receiver!r} sends nowhere"
    )
    return judged(bool(channels), name, expected, found, fix, "warn")


def default_receiver(text: str) -> tuple[str | None, list[str]]:
    """The root route's receiver and its channels ("email", "slack", ...); (None, []) for any other text."""
    try:
        config = yaml.safe_load(text)
        receiver = str(config["route"]["receiver"])
        entries = [entry for entry in config["receivers"] if entry["name"] == receiver]
    except (yaml.YAMLError, KeyError, TypeError):
        return None, []
    channels = [
        key.removesuffix("_configs")
        for entry in entries
        for key, value in entry.items()
        if key.endswith("_configs") and value
    ]
    return receiver, channels


def _json(answer: Answer | None) -> Mapping[str, Any]:
    """The JSON object of an answer, whatever its status; empty for anything else."""
    try:
        found = json.loads(answer.text) if answer else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
