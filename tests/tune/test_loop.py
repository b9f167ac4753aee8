"""`make tune` on a real engine: it beats a bad profile, keeps a good one, and leaves the files alone until then.

The whole takes some 30 minutes on two shared cores; `-m ci` is the part that runs with every commit.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
GOOD = ROOT / "configs/engine/smollm2-135m.cpu.yaml"
LIMIT_S = 900  # what the whole of it may take on a CPU with the small model
# Loose enough for two cores that others use, too: their noise must not decide.
PROMISE = ("--ttft-s", "20", "--itl-s", "1")
SMALL = ("--most-in-flight", "8", "--soak-s", "10")


class Place:
    """A profile and gateway settings of their own, and what a run on them said."""

    def __init__(self, folder: Path, summary: dict[str, Any], **flags: Any) -> None:
        self.profile, self.gateway, self.out = folder / "p.cpu.yaml", folder / "gateway.yaml", folder / "out"
        text = GOOD.read_text()
        for name, value in flags.items():
            flag = name.replace("_", "-")
            text = "\n".join(f"{flag}: {value}" if line.startswith(f"{flag}:") else line for line in text.split("\n"))
        self.profile.write_text(text)
        shutil.copy(ROOT / "configs/gateway.yaml", self.gateway)
        self.before = (self.profile.read_text(), self.gateway.read_text())
        self.summary = summary

    def arguments(self, *more: str) -> list[str]:
        return ["--gateway-settings", str(self.gateway), "--out", str(self.out), *PROMISE, *more]

    def command(self, *more: str) -> list[str]:
        return [sys.executable, "-m", "scripts.tune", str(self.profile), *self.arguments(*more)]

    def make(self, *more: str) -> list[str]:
        return ["make", "tune", f"PROFILE={self.profile}", f"ARGS={' '.join(self.arguments(*more))}"]

    def run(self, name: str, command: list[str]) -> dict[str, Any]:
        """The report; its figures go into the summary under the name."""
        began = time.monotonic()
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
        assert ran.returncode == 0, ran.stderr
        report: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        short = ("in_flight", "tokens_per_s", "repeats", "prefill_tokens_per_s", "decode_tokens_per_s", "changes")
        self.summary[name] = {
            "seconds": round(time.monotonic() - began),
            "replaced": report["replaced"],
            "resumed_trials": report["resumed_trials"],
            "trials": report["trials"],
            "limits": report["limits"],
            "soak": report["soak"],
            **{
                part: {key: _rounded(report[part][key]) for key in short if key in report[part]}
                for part in ("current", "best")
                if part in report
            },
        }
        return report

    def untouched(self) -> bool:
        return (self.profile.read_text(), self.gateway.read_text()) == self.before


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 1) if isinstance(value, float) else value


@pytest.mark.ci
def test_without_a_trial_it_measures_and_keeps_the_profile(tmp_path: Path, summary: dict[str, Any]) -> None:
    place = Place(tmp_path, summary)
    sizes = ("--most-in-flight", "4", "--trials", "0", "--repeats", "1", "--soak-s", "1")
    report = place.run("measured alone", place.command(*sizes))
    current = report["current"]
    assert current["prefill_tokens_per_s"] > 50
    assert current["decode_tokens_per_s"] > current["tokens_per_s"] > 10
    assert current["kv_tokens"] == report["planned_kv_tokens"] == 23296  # what the profile's comment says, too
    assert report["soak"]["lost"] == 0
    assert report["limits"]["admission.max_queue_tokens"] == max(1024, int(current["prefill_tokens_per_s"] * 20))
    assert not report["replaced"]
    assert place.untouched()
    assert "Kept as it was" in (place.out / "report.md").read_text()


@pytest.mark.ci
def test_a_profile_that_does_not_start_is_one_line(tmp_path: Path, summary: dict[str, Any]) -> None:
    place = Place(tmp_path, summary, block_size=7)
    ran = subprocess.run(place.command(), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("tune: the current profile can't be measured: ")
    assert "Traceback" not in ran.stderr
    assert place.untouched()


def test_a_bad_profile_is_replaced_and_can_be_had_back(tmp_path: Path, summary: dict[str, Any]) -> None:
    """`make tune` with its own sizes for a CPU: it must find a better profile, and end in time."""
    place = Place(tmp_path, summary, max_num_seqs=1)
    report = place.run("a bad profile", place.make())
    assert report["replaced"], report
    assert summary["a bad profile"]["seconds"] < LIMIT_S
    tuned = yaml.safe_load(place.profile.read_text())
    assert tuned["max-num-seqs"] > 1
    assert min(report["best"]["repeats"]) > 1.03 * max(report["current"]["repeats"])
    limits = yaml.safe_load(place.gateway.read_text())
    assert limits["admission"]["max_queue_tokens"] == report["limits"]["admission.max_queue_tokens"]
    back = subprocess.run(place.make("--revert"), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert back.returncode == 0, back.stderr
    assert place.untouched()


def test_a_good_profile_is_kept(tmp_path: Path, summary: dict[str, Any]) -> None:
    place = Place(tmp_path, summary)
    report = place.run("a good profile", place.command(*SMALL, "--trials", "3"))
    assert len(report["trials"]) >= 2
    assert not report["replaced"], report
    assert place.untouched()


def test_an_interrupted_run_leaves_no_process_and_goes_on_with_its_trials(
    tmp_path: Path, summary: dict[str, Any]
) -> None:
    place = Place(tmp_path, summary)
    run = place.command(*SMALL, "--trials", "2", "--repeats", "1", "--keep")
    first = subprocess.Popen(run, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    said = ""
    while "trial 2" not in said:  # the first trial is over, the second has begun
        line = first.stderr.readline()
        assert line, said
        said += line
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGTERM)
    rest = first.communicate(timeout=60)[1]
    assert first.returncode == 128 + signal.SIGTERM
    assert "the profile is as it was, and the same command goes on with the trials made" in rest
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert place.untouched()
    report = place.run("interrupted", run)
    assert report["resumed_trials"] == 1
    assert len(report["trials"]) == 2
    cut = dict(part.split("=") for part in said.strip().splitlines()[-1].split(": ", 1)[1].split())
    assert cut == {name: str(value) for name, value in report["trials"][1]["changes"].items()}  # not lost
    assert place.untouched()
