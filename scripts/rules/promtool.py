"""promtool on one rule and the tests that speak of it: a tenth of a second, where a whole file takes several."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from scripts.rules import Alert, Component, Record
from scripts.rules.render import Renderer

TESTS = Path("tests/promtool")
_RUN_S = 60
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # seconds quicker
_NAMES = re.compile(r"[A-Za-z_:][\w:]*")
Rule = Record | Alert


@cache
def load_tests(component: str, folder: Path = TESTS) -> list[dict[str, Any]]:
    """The documents of tests/promtool/<component>_*.yml."""
    files = sorted(folder.glob(f"{component}_*.yml"))
    return [yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER) for path in files]  # noqa: S506


def items(group: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], set[str]]]:
    """(kind, item, what it names) of a test group."""
    return [
        (kind, item, set(_NAMES.findall(item.get("alertname") or item["expr"])))
        for kind in ("alert_rule_test", "promql_expr_test")
        for item in group.get(kind, ())
    ]


def about(tests: list[dict[str, Any]], names: Collection[str]) -> list[dict[str, Any]]:
    """Only what speaks of one of these rules."""
    kept = []
    for document in tests:
        groups = []
        for group in document["tests"]:
            chosen = [(kind, item) for kind, item, said in items(group) if said & set(names)]
            if chosen:
                rest = {key: value for key, value in group.items() if not key.endswith("_test")}
                for kind, item in chosen:
                    rest.setdefault(kind, []).append(item)
                groups.append(rest)
        if groups:
            kept.append({**document, "tests": groups})
    return kept


def dependents(component: Component, name: str) -> set[str]:
    """The rules of the file that read the series `name`, directly or not."""
    found = {name}
    while more := {
        rule.name for rule in component.rules if rule.name not in found and found & set(_NAMES.findall(rule.expr))
    }:
        found |= more
    return found - {name}


def _needed(component: Component, tests: list[dict[str, Any]]) -> Component:
    """Without the rules that neither these tests nor the rest of the rules read."""
    wanted = {name for document in tests for group in document["tests"] for _, _, said in items(group) for name in said}
    while (
        more := {name for rule in component.rules if rule.name in wanted for name in _NAMES.findall(rule.expr)} - wanted
    ):
        wanted |= more
    return Component(component.name, component.says, tuple(rule for rule in component.rules if rule.name in wanted))


def passes(component: Component, tests: list[dict[str, Any]], renderer: Renderer) -> bool:
    """Whether these tests pass on these rules."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rules = folder / "rules.yml"
        rules.write_text(renderer.file(_needed(component, tests)), encoding="utf-8")
        files = []
        for number, document in enumerate(tests):
            path = folder / f"{number}.yml"  # JSON is YAML
            path.write_text(json.dumps({**document, "rule_files": [rules.name]}), encoding="utf-8")
            files.append(path.name)
        command = ["promtool", "test", "rules", *files]
        return subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=_RUN_S).returncode == 0
