"""`make tune` on a real engine: it beats a bad profile, keeps a good one, and leaves the files alone until then.

The whole takes about twenty minutes on two cores; `-m ci` is the part that runs with every commit.
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

from scripts import model_fetch

ROOT = Path(__file__).parent.parent.parent
GOOD = ROOT / "configs/engine/smollm2-135m.cpu.yaml"
# Small: few in flight, few requests, answers may be slow. The promise is loose enough for two shared cores.
SMALL = ("--most-in-flight", "8", "--waves", "2", "--ttft-s", "20", "--itl-s", "1", "--soak-s", "1")


class Place:
    """A profile and gateway settings of their own, and what a run on them said."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        self.profile, self.gateway, self.out = folder / "p.yaml", folder / "gateway.yaml", folder / "out"
        text = GOOD.read_text()
        for name, value in flags.items():
            flag = name.replace("_", "-")
            text = "\n".join(f"{flag}: {value}" if line.startswith(f"{flag}:") else line for line in text.split("\n"))
        self.profile.write_text(text)
        shutil.copy(ROOT / "configs/gateway.yaml", self.gateway)
        self.before = (self.profile.read_text(), self.gateway.read_text())

    def command(self, *more: str) -> list[str]:
        model = str(model_fetch.model_dir())
        place = ("--gateway-settings", str(self.gateway), "--out", str(self.out), "--platform", "cpu")
        return [sys.executable, "-m", "scripts.tune", str(self.profile), "--model", model, *place, *SMALL, *more]

    def run(self, *more: str) -> dict[str, Any]:
        ran = subprocess.run(self.command(*more), cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
        assert ran.returncode == 0, ran.stderr
        report: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        return report

    def untouched(self) -> bool:
        return (self.profile.read_text(), self.gateway.read_text()) == self.before


@pytest.mark.ci
def test_without_a_trial_it_measures_and_keeps_the_profile(tmp_path: Path) -> None:
    place = Place(tmp_path)
    report = place.run("--trials", "0", "--repeats", "1")
    current = report["current"]
    assert current["prefill_tokens_per_s"] > 50
    assert current["kv_tokens"] == 23296  # what the profile's comment says
    assert current["tokens_per_s"] > 10
    assert report["soak"]["lost"] == 0
    assert report["limits"]["admission.max_queue_tokens"] == max(1024, int(current["prefill_tokens_per_s"] * 20))
    assert not report["replaced"]
    assert place.untouched()
    assert "Kept as it was" in (place.out / "report.md").read_text()


@pytest.mark.ci
def test_a_profile_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    place = Place(tmp_path, block_size=7)
    ran = subprocess.run(place.command(), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("tune: the current profile can't be measured: ")
    assert "Traceback" not in ran.stderr
    assert place.untouched()


def test_a_bad_profile_is_replaced_and_can_be_had_back(tmp_path: Path) -> None:
    place = Place(tmp_path, max_num_seqs=1)
    report = place.run("--trials", "1", "--repeats", "2")
    assert report["replaced"], report
    tuned = yaml.safe_load(place.profile.read_text())
    assert tuned["max-num-seqs"] > 1
    assert min(report["best"]["repeats"]) > max(report["current"]["repeats"])
    limits = yaml.safe_load(place.gateway.read_text())
    assert limits["admission"]["max_queue_tokens"] == report["limits"]["admission.max_queue_tokens"]
    back = subprocess.run(place.command("--revert"), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert back.returncode == 0, back.stderr
    assert place.untouched()


def test_a_good_profile_is_kept(tmp_path: Path) -> None:
    place = Place(tmp_path)
    report = place.run("--trials", "2", "--repeats", "2")
    assert len(report["trials"]) >= 1
    assert not report["replaced"], report
    assert place.untouched()


def test_an_interrupted_run_leaves_no_process_and_goes_on_with_its_trials(tmp_path: Path) -> None:
    place = Place(tmp_path)
    run = place.command("--trials", "2", "--repeats", "1")
    first = subprocess.Popen(run, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    said = ""
    until = time.monotonic() + 900
    while "trial 2" not in said:  # the first trial is over, the second has begun
        assert time.monotonic() < until
        line = first.stderr.readline()
        assert line, said
        said += line
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert first.returncode == 128 + signal.SIGTERM
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert place.untouched()
    report = place.run("--trials", "2", "--repeats", "1", "--keep")
    assert report["resumed_trials"] >= 1
