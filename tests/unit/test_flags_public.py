"""Command lines published from 2023 to 2026, and that the releases of their time had their flags."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.flags_answers import findings, verdicts

LINES = yaml.safe_load(Path(__file__).with_name("public_commands.yaml").read_text())
ABSENT = {"unknown", "never existed", "not yet", "removed"}


def name(line: dict[str, Any]) -> str:
    return f"{line['year']} {line['from']}"


def test_there_are_lines_of_each_year() -> None:
    assert len(LINES) >= 15
    assert {line["year"] for line in LINES} == {2023, 2024, 2025, 2026}


@pytest.mark.parametrize("line", LINES, ids=name)
def test_each_published_line_is_judged(line: dict[str, Any]) -> None:
    found = verdicts(line["command"])
    assert {subject: found.get(subject) for subject in line["expect"]} == line["expect"]
    assert "unknown" not in found.values(), "everything in a published line was a flag once"


@pytest.mark.parametrize("line", LINES, ids=name)
def test_the_release_of_its_time_had_every_flag_of_a_line(line: dict[str, Any]) -> None:
    """So the old flags come out of the old releases' sources, and not only out of the published lines."""
    then = [f for f in findings(line["command"], line["had"]) if f.kind == "flag"]
    assert then
    assert [f.subject.en for f in then if f.verdict in ABSENT] == []
