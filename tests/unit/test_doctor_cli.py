"""The report as people and programs get it, and its exit codes."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from scripts import doctor
from scripts.checks import Check, report, worst
from scripts.checks.probes import ROOT, Probes, Ran


@pytest.mark.parametrize(
    ("statuses", "status", "code"),
    [
        ([], "skip", 0),
        (["skip", "skip"], "skip", 0),
        (["skip", "ok"], "ok", 0),
        (["ok", "warn", "skip"], "warn", 3),
        (["warn", "fail", "ok"], "fail", 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst_finding(statuses: list[str], status: str, code: int) -> None:
    found = worst(Check("x", one, "", "") for one in statuses)  # type: ignore[arg-type]
    assert found == status
    assert doctor.EXIT_CODES[found] == code


def test_every_finding_shows_status_expected_found_and_fix() -> None:
    checks = [
        Check("a.one", "ok", "more than 1", "2"),
        Check("a.two", "skip", "a card", "there is none"),
        Check("b.three", "warn", "blue", "red", "paint it"),
        Check("b.four", "fail", "up", "down", "lift it"),
    ]
    text = "\n".join(report.lines(checks))
    assert "  ok   a.one    2   (expected: more than 1)" in text
    assert "  skip a.two    not checked: there is none   (expected: a card)" in text
    for word in ("WARN b.three  expected: blue", "found:    red", "fix:      paint it", "FAIL b.four   expected: up"):
        assert word in text
    assert report.summary(checks) == "1 ok, 1 to mind, 1 failed, 1 not checked here"


def test_json_holds_what_the_text_does(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main(["--for", "demo", "--only", "host,settings", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["purpose"] == "demo"
    assert doctor.EXIT_CODES[found["worst"]] == code
    assert {check["name"].split(".")[0] for check in found["checks"]} == {"host", "settings"}
    assert {tuple(check) for check in found["checks"]} == {("name", "status", "expected", "found", "fix")}
    for check in found["checks"]:
        assert bool(check["fix"]) == (check["status"] in ("warn", "fail")), check


def test_the_whole_doctor_runs_on_this_machine() -> None:
    """As `make doctor` starts it: every group answers, nothing is a traceback, and the exit code is the worst."""
    command = [sys.executable, "-m", "scripts.doctor", "--for", "demo", "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert ran.stderr == ""
    found = json.loads(ran.stdout)
    names = [check["name"] for check in found["checks"]]
    assert len(names) == len(set(names))
    assert {name.split(".")[0] for name in names} == set(doctor.GROUPS)
    assert ran.returncode == doctor.EXIT_CODES[found["worst"]]


def test_a_gpu_box_where_everything_is_missing_fails_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Ran | None:
        return None

    eyes = Probes(
        run=nothing,
        read=lambda path: None,
        get=lambda url: None,
        disk_free=lambda path: None,
        port_holder=lambda port: None,
        environ={"MODELS_DIR": "/nowhere"},
        root=tmp_path,
    )
    assert doctor.main(["--for", "stack", "--profile", "llama3-8b-awq.rtx4090"], eyes) == 1
    out = capsys.readouterr().out
    for name in ("docker.engine", "gpu.driver", "model.directory", "settings.env"):
        assert f"FAIL {name}" in out


@pytest.mark.parametrize("argv", [["--only", "hots"], ["--for", "fun"], ["--model", "/nowhere/at/all"], ["--nonsense"]])
def test_wrong_usage_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = doctor.main(argv)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    assert code == 2
    assert capsys.readouterr().out == ""
