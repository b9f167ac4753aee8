"""docs/faults.md says what the committed run measured, and nothing else."""

from __future__ import annotations

import json

import pytest

from scripts import faults_doc


def test_the_page_is_what_the_committed_figures_say() -> None:
    assert faults_doc.main(["--check"]) == 0


def test_a_run_that_missed_a_fault_is_refused_by_its_name() -> None:
    summary = json.loads(faults_doc.SUMMARY.read_text(encoding="utf-8"))
    del summary["faults"]["engine hung"]
    with pytest.raises(KeyError, match="engine hung"):
        faults_doc.render(summary)
