"""The rules against promtool: every alert and every recorded series has its tests, and they pass."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts.rules import Alert, Component, Record, promises
from scripts.rules.components import ALL
from scripts.rules.mutants import mutants
from scripts.rules.promtool import TESTS, about, items, load_tests, passes
from scripts.rules.render import Renderer

ROOT = Path(__file__).parents[2]
RULES = ROOT / "configs/prometheus/rules"
ALERTS = [(component, rule) for component in ALL for rule in component.alerts]
RECORDS = [(component, rule) for component in ALL for rule in component.records]
FILES = sorted(path.name for path in (ROOT / TESTS).glob("*.yml"))
RENDERER = Renderer(promises.load())


def test_promtool_accepts_rules_and_configuration() -> None:
    for command in (["rules", *map(str, RULES.iterdir())], ["config", "configs/prometheus/prometheus.yml"]):
        done = subprocess.run(["promtool", "check", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES)
def test_promtool_tests_pass(file: str) -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", file], cwd=ROOT / TESTS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize(("component", "alert"), ALERTS, ids=lambda it: it.name)
def test_every_alert_is_seen_silent_firing_and_cleared(component: Component, alert: Alert) -> None:
    """Within one group, with its severity and the words it says; the watchdog is never silent."""
    groups = [group for document in load_tests(component.name) for group in document["tests"]]
    lives = []
    for group in groups:
        tests = [
            item for kind, item, _ in items(group) if kind == "alert_rule_test" and item["alertname"] == alert.name
        ]
        fired = [
            any(
                one["exp_labels"]["severity"] == alert.severity and "description" in one["exp_annotations"]
                for one in item["exp_alerts"]
            )
            for item in sorted(tests, key=lambda item: seconds(item["eval_time"]))
        ]
        lives.append(fired)
    if alert.name == "Watchdog":
        assert lives.count([True, True]) == 1
    elif alert.name == "EngineKvPressure" and alert.severity == "critical":
        assert [True, False] in lives  # silent before: an expression over ALERTS
    else:
        assert any(True in life[1:-1] and not life[0] and not life[-1] for life in lives), lives


def seconds(said: str) -> int:
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", said))


@pytest.mark.parametrize(("component", "record"), RECORDS, ids=lambda it: it.name)
def test_every_recorded_series_has_a_value_expected_of_it(component: Component, record: Record) -> None:
    tests = about(load_tests(component.name), {record.name})
    samples = [
        sample
        for document in tests
        for group in document["tests"]
        for item in group.get("promql_expr_test", ())
        for sample in item["exp_samples"]
        if sample["labels"].startswith(record.name)
    ]
    assert samples


def test_a_wrong_rule_is_noticed() -> None:
    """One of each kind; `make mutate-rules` tries all of them."""
    component = next(one for one in ALL if one.name == "gpu")
    tests = load_tests("gpu")
    tried = {}
    for mutant in mutants(component, RENDERER):
        if mutant.rule == "GpuTooHot":
            tried[mutant.says] = passes(mutant.component, about(tests, {"GpuTooHot"}), RENDERER)
    assert tried == dict.fromkeys(
        [
            "DCGM_FI_DEV_GPU_TEMP -> DCGM_FI_DEV_GPU_TEMP_renamed at 0",
            "> -> <= at 21",
            "> -> >= at 21",
            "85 -> 84 at 23",
            "85 -> 86 at 23",
            "for: 5m -> 150s",
            "for: 5m -> 450s",
        ],
        False,
    )
    assert passes(component, about(tests, {"GpuTooHot"}), RENDERER)
