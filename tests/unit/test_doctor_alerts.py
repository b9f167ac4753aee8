"""The doctor on alerts that would reach nobody, and the shipped routes, receivers and inhibitions against the rules."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.checks import Check, alerts
from scripts.checks.probes import Probes
from scripts.checks.subject import decide
from scripts.rules.components import ALL

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs/alertmanager"
SHIPPED = (FOLDER / "alertmanager.yml").read_text(encoding="utf-8")
EXAMPLE = (FOLDER / "webhook.example.yml").read_text(encoding="utf-8")
ALERTS = {alert.name for component in ALL for alert in component.alerts}


def configuration(receivers: str = "") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(SHIPPED)
    return {**found, **yaml.safe_load(receivers)} if receivers else found


def look(root: Path, text: str | None, purpose: str = "stack") -> dict[str, Check]:
    path = root / alerts.FILE
    if text is not None:
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    eyes = Probes(run=lambda command, environ=None: None, get=lambda url: None, environ={}, root=root)
    return {check.name: check for check in alerts.checks(eyes, decide(eyes, purpose, "smollm2-135m.cpu", None))}


def test_the_shipped_configuration_reaches_nobody_and_the_doctor_says_so(tmp_path: Path) -> None:
    found = look(tmp_path, SHIPPED)
    assert {name: (check.status, check.found) for name, check in found.items()} == {
        "alerts.critical": ("warn", "receiver 'page' sends nowhere"),
        "alerts.warning": ("warn", "receiver 'ticket' sends nowhere"),
        "alerts.watchdog": ("warn", "receiver 'watchdog' sends nowhere"),
    }


def test_the_example_as_it_is_reaches_nobody_either(tmp_path: Path) -> None:
    found = look(tmp_path, yaml.safe_dump(configuration(EXAMPLE)))
    assert {check.status for check in found.values()} == {"warn"}
    assert found["alerts.critical"].found == "receiver 'page' sends by webhook, to the example's address"


def test_receivers_of_ones_own_are_well(tmp_path: Path) -> None:
    found = look(tmp_path, yaml.safe_dump(configuration(EXAMPLE.replace("example.org", "ours.test"))))
    assert {check.status for check in found.values()} == {"ok"}


def test_a_demo_and_a_missing_file_are_not_checked(tmp_path: Path) -> None:
    assert {check.status for check in look(tmp_path, None).values()} == {"skip"}
    assert {check.status for check in look(tmp_path, None, "demo").values()} == {"skip"}


@pytest.mark.parametrize("text", ["route: [", "route: {}", "receivers: []\nroute: {receiver: none}", "12"])
def test_a_file_that_is_no_configuration_fails_in_one_line(tmp_path: Path, text: str) -> None:
    (only,) = look(tmp_path, text).values()
    assert (only.name, only.status) == ("alerts.critical", "fail")
    assert "\n" not in only.found


def test_routes_send_each_severity_to_its_receiver() -> None:
    route = configuration()["route"]
    kinds = {name: alerts.receiver(route, labels) for name, labels in alerts.KINDS.items()}
    assert kinds == {"alerts.critical": "page", "alerts.warning": "ticket", "alerts.watchdog": "watchdog"}


def test_inhibitions_name_alerts_that_exist() -> None:
    for rule in configuration()["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            name, sign, value = re.fullmatch(r'(\w+)(=~|=)"(.*)"', matcher).groups()  # type: ignore[union-attr]
            if name != "alertname":
                continue
            parts = re.findall(r"\w+\([^)]*\)|[\w.*]+", value) if sign == "=~" else [value]
            for part in parts:  # every alternative silences, or is silenced by, something
                assert any(re.fullmatch(part, alert) for alert in ALERTS), part


def test_an_absent_engine_silences_its_consequences_and_nothing_else() -> None:
    silenced = set()
    for rule in configuration()["inhibit_rules"]:
        (source, *_) = rule["source_matchers"]
        if "EngineAbsent" in source and len(rule["target_matchers"]) == 1:
            pattern = rule["target_matchers"][0].split('"')[1]
            silenced |= {alert for alert in ALERTS if re.fullmatch(pattern, alert)}
    assert silenced == {
        "EngineHung", "EngineKvPressure", "EnginePreemptions", "EngineLowHitRatio", "EngineQueueSaturated",
        "GatewayNoReadyReplica", "GatewayReplicaNotReady", "GatewayQueueSaturated", "GatewayShedding",
        "SloErrorBudgetBurnFast", "SloErrorBudgetBurnSlow", "TtftSloMissed", "ItlSloMissed",
    }  # fmt: skip


def test_one_engine_of_several_silences_only_what_is_said_of_the_same_one() -> None:
    found = {}
    for rule in configuration()["inhibit_rules"]:
        if any("CircuitOpen" in matcher for matcher in rule["target_matchers"]):
            found[rule["source_matchers"][0].split('"')[1]] = rule["equal"]
    assert found == {"EngineHung": ["replica"], "ScrapeTargetDown|EngineCrashLoop": ["instance"]}


def test_the_example_has_the_receivers_that_the_routes_name() -> None:
    named = {entry["name"] for entry in configuration()["receivers"]}
    assert {entry["name"] for entry in yaml.safe_load(EXAMPLE)["receivers"]} == named


@pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is not installed here")
@pytest.mark.parametrize("receivers", ["", EXAMPLE], ids=["shipped", "example"])
def test_amtool_accepts_the_configuration(tmp_path: Path, receivers: str) -> None:
    path = tmp_path / "alertmanager.yml"
    path.write_text(yaml.safe_dump(configuration(receivers)), encoding="utf-8")
    done = subprocess.run(["amtool", "check-config", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
