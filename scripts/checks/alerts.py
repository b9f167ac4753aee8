"""Alertmanager's configuration on disk: does each kind of alert reach anybody? stack.alerts asks the running one."""

from __future__ import annotations

from typing import Any

import yaml

from scripts.checks import Check, fail, judged, skip
from scripts.checks.probes import Probes
from scripts.checks.subject import Subject

FILE = "configs/alertmanager/alertmanager.yml"
# A check -> the labels of an alert of that kind.
KINDS = {
    "alerts.critical": {"alertname": "EngineAbsent", "severity": "critical"},
    "alerts.warning": {"alertname": "EnginePreemptions", "severity": "warning"},
    "alerts.watchdog": {"alertname": "Watchdog", "severity": "none"},
}
_EXPECTED = {
    "alerts.critical": "critical alerts reach somebody",
    "alerts.warning": "warnings reach a place where they are seen",
    "alerts.watchdog": "a dead man's switch hears the watchdog",
}
_EXAMPLE = "example.org"


def checks(probes: Probes, subject: Subject) -> list[Check]:
    if subject.purpose == "demo":
        return [skip(name, _EXPECTED[name], "the demo runs no Alertmanager") for name in KINDS]
    text = probes.read(probes.root / FILE)
    if text is None:
        return [skip(name, _EXPECTED[name], f"there is no {FILE}") for name in KINDS]
    try:
        config = yaml.safe_load(text)
        receivers = {entry["name"]: entry for entry in config["receivers"]}
        return [_reached(name, receivers[receiver(config["route"], labels)]) for name, labels in KINDS.items()]
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        why = str(error).splitlines()[0] if isinstance(error, yaml.YAMLError) else f"{type(error).__name__}: {error}"
        fix = "compare it with the committed one: git diff configs/alertmanager"
        return [fail("alerts.critical", f"{FILE} is a configuration", f"it can't be used ({why})", fix)]


def receiver(route: dict[str, Any], labels: dict[str, str]) -> str:
    """The receiver of the first route that matches, depth first, as Alertmanager has it. Knows name="value" alone."""
    for child in route.get("routes") or ():
        if all(_matches(matcher, labels) for matcher in child.get("matchers") or ()):
            return receiver({"receiver": route["receiver"], **child}, labels)
    return str(route["receiver"])


def _matches(matcher: str, labels: dict[str, str]) -> bool:
    name, _, value = matcher.partition("=")
    return labels.get(name.strip()) == value.strip().strip('"')


def _reached(name: str, entry: dict[str, Any]) -> Check:
    channels = [key.removesuffix("_configs") for key, value in entry.items() if key.endswith("_configs") and value]
    example = _EXAMPLE in str(entry)
    said = f"receiver {entry['name']!r} sends " + (f"by {', '.join(channels)}" if channels else "nowhere")
    fix = (
        f"give {entry['name']!r} in {FILE} an address of yours (webhook.example.yml beside it shows one), then "
        "docker compose restart alertmanager"
    )
    found = f"{said}, to the example's address" if example else said
    return judged(bool(channels) and not example, name, _EXPECTED[name], found, fix, "warn")
