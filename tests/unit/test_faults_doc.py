"""docs/faults.md, and the stack's part of docs/benchmarks.md, say what was measured, and nothing else."""

from __future__ import annotations

import json

import pytest

from scripts import faults_doc


def test_the_pages_are_what_the_committed_figures_say() -> None:
    assert faults_doc.main(["--check"]) == 0


def test_a_run_that_missed_a_fault_is_refused_by_its_name() -> None:
    summary = json.loads(faults_doc.SUMMARY.read_text(encoding="utf-8"))
    del summary["faults"]["engine hung"]
    with pytest.raises(KeyError, match="engine hung"):
        faults_doc.render(summary)


def test_a_page_without_marks_for_its_part_is_left_alone() -> None:
    with pytest.raises(ValueError, match=r"docs/benchmarks\.md has no <!-- the stack: begin -->"):
        faults_doc.with_section("# Benchmarks\n", "new")
    page = f"before {faults_doc.BEGIN} old {faults_doc.END} after"
    assert faults_doc.with_section(page, "new") == "before new after"
