"""The mark of what runs with every commit, and the summary: what was measured goes to results/tune.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.hardware import hardware

ROOT = Path(__file__).parents[2]
SUMMARY = ROOT / "results" / "tune.json"
PART = ROOT / "results" / "tune-part.json"  # of a run that chose among the tests


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ci: of the three minutes that every commit gets (make test-tune ARGS='-m ci')")


def in_part(config: pytest.Config) -> bool:
    """Whether this run chose among the tests."""
    folders = all(Path(each).is_dir() for each in config.args)
    return bool(config.getoption("markexpr") or config.getoption("keyword") or not folders)


@pytest.fixture(scope="session")
def summary(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What the tests measured; written to results/ at the end."""
    machine = hardware()
    found: dict[str, Any] = {"machine": f"{machine['cores']} cores, {machine['memory_gib']:.0f} GiB, no GPU"}
    yield found
    path = PART if in_part(request.config) else SUMMARY
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")
