"""An installation step that fails says why in one line; scripts/step.sh and scripts/stage.sh are run as they are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def step(log: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts/step.sh"), "the packages", str(log), "bash", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_step_that_works_is_one_line_with_its_seconds(tmp_path: Path) -> None:
    done = step(tmp_path / "log", "echo chatter; echo more >&2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "  the packages ... 0 s\n", "")
    assert (tmp_path / "log").read_text() == "chatter\nmore\n"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("ERROR: [Errno 28] No space left on device", "no space left on the disk"),
        (
            "WARNING: after connection broken by 'X(<y>: [Errno 111] Connection refused')': /a/\nERROR: No match",
            "the package index can't be reached ([Errno 111] Connection refused)",
        ),
        ("ERROR: one\nERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n\n", "THESE PACKAGES DO NOT MATCH THE HASHES"),
        ("", "it said nothing"),
    ],
)
def test_a_step_that_fails_is_one_line_with_the_cause_and_what_to_do(tmp_path: Path, said: str, why: str) -> None:
    (tmp_path / "said").write_text(said)
    done = step(tmp_path / "log", f"cat {tmp_path / 'said'}; exit 2")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert why in done.stderr
    assert "Run the same command again" in done.stderr


@pytest.mark.parametrize(("code", "word"), [(0, "passed"), (3, "failed (exit code 3)")])
def test_a_stage_ends_with_a_line_of_its_seconds_and_hands_on_the_exit_code(code: int, word: str) -> None:
    command = [str(ROOT / "scripts/stage.sh"), "name", "bash", "-c", f"exit {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert re.fullmatch(rf"=== name\n=== name: {re.escape(word)} in \d+ s\n", done.stdout)
