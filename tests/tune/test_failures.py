"""`make tune` where a later stage fails: told as what it is, files untouched, and the same command goes on.

The whole of it runs as its users run it, the real load generator too; the engine is the scripted one, whose speed is
known, so that the search always finds something better.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts import model_fetch

ROOT = Path(__file__).parents[2]
ENGINE_PYTHON = ROOT / ".venv-engine/bin/python"
BROKEN = "ModuleNotFoundError: No module named 'cbor2'"
GOES_ON = "; the profile is as it was, and the same command goes on with the trials made"
SIZES = (
    "--trials",
    "1",
    "--repeats",
    "1",
    "--soak-s",
    "0.1",
    "--most-in-flight",
    "4",
    "--ttft-s",
    "20",
    "--itl-s",
    "5",
)
# Starts of engines in a run that makes its one trial, and in one that takes it over.
TRIED = {"current": 1, "trial": 2, "best": 3, "again": 4, "soak": 5}
TAKEN_OVER = {"current": 1, "best": 2, "again": 3, "soak": 4}


class Place:
    """A profile that serves one at a time, settings, and an environment with vLLM that may break on the way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.profile, self.gateway, self.out = folder / "p.cpu.yaml", folder / "gateway.yaml", folder / "out"
        self.profile.write_text("max-num-seqs: 1\n")
        shutil.copy(ROOT / "configs/gateway.yaml", self.gateway)
        self.before = (self.profile.read_text(), self.gateway.read_text())
        self.model = folder / "model"
        self.model.mkdir()
        for path in model_fetch.model_dir().iterdir():
            if path.name != "config.json":
                (self.model / path.name).symlink_to(path)
        config = json.loads((model_fetch.model_dir() / "config.json").read_text())
        (self.model / "config.json").write_text(json.dumps({**config, "service_s": 0.05}))
        self.python = folder / "python"
        self.python.write_text(
            f"""#!/bin/sh
[ "$1 $3" = "-m serve" ] || exec {ENGINE_PYTHON} "$@"
echo >>{folder}/starts
if grep -qx "$(wc -l <{folder}/starts)" {folder}/broken; then echo "{BROKEN}" >&2; exit 1; fi
exec {sys.executable} -m tests.fakes.vllm "$@"
"""
        )
        self.python.chmod(0o755)

    def command(self, *, make: bool = False) -> list[str]:
        where = ["--gateway-settings", str(self.gateway), "--python", str(self.python), "--model", str(self.model)]
        where += ["--out", str(self.out), *SIZES]
        if make:
            return ["make", "--no-print-directory", "tune", f"PROFILE={self.profile}", f"ARGS={' '.join(where)}"]
        return [sys.executable, "-m", "scripts.tune", str(self.profile), *where]

    def break_starts(self, *broken: int) -> None:
        """Of the engines that are started from now on, those of these numbers fail, the first being 1."""
        (self.folder / "starts").unlink(missing_ok=True)
        (self.folder / "broken").write_text("".join(f"{number}\n" for number in broken))

    def run(self, *broken: int, **environment: str) -> subprocess.CompletedProcess[str]:
        self.break_starts(*broken)
        return subprocess.run(
            self.command(),
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def untouched(self) -> bool:
        return (self.profile.read_text(), self.gateway.read_text()) == self.before


def last_line(ran: subprocess.CompletedProcess[str]) -> str:
    assert ran.returncode == 1, ran.stderr
    assert "Traceback" not in ran.stderr
    return ran.stderr.splitlines()[-1]


@pytest.mark.ci
def test_a_stage_that_fails_is_named_and_the_trial_made_before_it_is_not_made_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    ran = place.run(TRIED["best"], GATEWAY__ADMISSION__MAX_WAIT_S="soon")
    assert last_line(ran) == (
        "tune: limits and soak failed: ended with code 1: gateway: admission.max_wait_s = 'soon': expected a number "
        f"({place.out}/gateway.log){GOES_ON}"
    )
    assert place.untouched()

    ran = place.run(TAKEN_OVER["best"])
    assert ran.returncode == 0, ran.stderr
    assert f"Kept as it was: the best trial failed when it was started again ({BROKEN})." in ran.stdout
    report = json.loads((place.out / "report.json").read_text())
    assert (report["replaced"], report["resumed_trials"]) == (False, 1)
    assert report["unconfirmed"] == {"changes": report["trials"][0]["changes"], "failed": BROKEN}
    assert place.untouched()


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        # Whether the best trial's engine starts doesn't matter where the current profile's doesn't either.
        (("best", "again"), "the current profile again failed"),
        (("soak",), "limits and soak failed"),
        (("current",), "the current profile can't be measured"),
    ],
)
def test_an_engine_that_no_longer_starts_is_told_by_its_stage(
    broken: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    place = Place(tmp_path)
    end = "" if broken == ("current",) else GOES_ON
    assert last_line(place.run(*(TRIED[stage] for stage in broken))) == f"tune: {says}: {BROKEN}{end}"
    assert place.untouched()


@pytest.mark.parametrize(("make", "number"), [(True, signal.SIGINT), (False, signal.SIGINT), (False, signal.SIGKILL)])
def test_a_run_ended_in_a_trial_leaves_no_process_and_the_same_command_makes_that_trial(
    make: bool, number: int, tmp_path: Path
) -> None:
    place = Place(tmp_path)
    place.break_starts()
    run = subprocess.Popen(
        place.command(make=make), cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert run.stderr is not None
    said = ""
    while "\ntrial 1" not in said:
        line = run.stderr.readline()
        assert line, said
        said += line
    while len((tmp_path / "starts").read_text()) < TRIED["trial"]:  # its engine is on its way
        assert run.poll() is None
        time.sleep(0.01)
    family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    os.killpg(run.pid, number) if make else run.send_signal(number)  # a terminal's Ctrl-C goes to all of them
    rest = run.communicate(timeout=60)[1]
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert "Traceback" not in rest
    if number == signal.SIGINT:
        assert f"interrupted{GOES_ON}" in rest
    assert place.untouched()
    again = place.run()
    assert again.returncode == 0, again.stderr
    report = json.loads((place.out / "report.json").read_text())
    assert [trial["changes"] for trial in report["trials"]] == [
        {name: int(value) for name, value in (part.split("=") for part in said.split(": ")[-1].split())}
    ]
    assert report["replaced"]
    assert not place.untouched()
