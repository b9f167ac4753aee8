"""A release's recorded page as input of `promtool test rules`: an engine that goes on as it did between two pages."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

SCRAPES = Path("tests/fixtures/scrapes")
RULES = Path("configs/prometheus/rules")
STEPS = 40  # of 15 s
TARGET = {"job": "engine", "instance": "engine:8000"}


def families(name: str) -> dict[str, Metric]:
    """A page of tests/fixtures/scrapes."""
    text = (SCRAPES / f"{name}.prom").read_text(encoding="utf-8")
    return {family.name: family for family in text_string_to_metric_families(text)}


def series(page: Mapping[str, Metric]) -> list[dict[str, str]]:
    """input_series: what counts grows by the page's figure a step, what measures stays as it is."""
    made = []
    for family in page.values():
        for sample in family.samples:
            if not sample.name.startswith("vllm:") or sample.name.endswith("_created"):
                continue
            labels = ",".join(f'{key}="{value}"' for key, value in (TARGET | sample.labels).items())
            growing = family.type == "counter" or (family.type == "histogram")
            values = f"0+{sample.value!r}x{STEPS}" if growing else f"{sample.value!r}+0x{STEPS}"
            made.append({"series": f"{sample.name}{{{labels}}}", "values": values})
    return made


def promtool(folder: Path, page: Mapping[str, Metric], expected: Mapping[str, float | None]) -> str:
    """Runs the rules over the page; expression -> value at the end, None for no value. Returns what promtool says."""
    tests = [
        {
            "expr": expression,
            "eval_time": "10m",
            "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
        }
        for expression, value in expected.items()
    ]
    case: dict[str, Any] = {"interval": "15s", "input_series": series(page), "promql_expr_test": tests}
    files = [str(path.absolute()) for path in sorted(RULES.glob("*.yml"))]
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": files, "evaluation_interval": "15s", "tests": [case]}))
    done = subprocess.run(("promtool", "test", "rules", str(path)), capture_output=True, text=True, check=False)
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    return "" if done.returncode == 0 else "; ".join(line for line in said if line)
