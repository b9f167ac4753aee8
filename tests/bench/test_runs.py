"""`make bench` as its users run it: what is reused and what is not, what an end by force leaves, what is meant to fail.

The engine is the scripted one, started as the real one is; whole answers need no load generator.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from scripts.bench import compare

ROOT = Path(__file__).parents[2]
ROW = {"workload": "short", "requests": 4, "in_flight": 2, "repeats": 1, "endpoint": "completions", "stream": False}
DIRECT = {"name": "direct", "rows": [{"name": "one", **ROW}, {"name": "two", **ROW}]}
UNKNOWN = {"name": "unknown", "arguments": ["--enable-paged-attn"], "rows": [{"name": "one", **ROW}]}


class Bench:
    """A plan, a model and a stand-in for the engine's python, in a folder of their own."""

    def __init__(self, folder: Path, *boots: dict[str, Any], **config: Any) -> None:
        self.plan, self.out, self.model = folder / "plan.yaml", folder / "out", folder / "model"
        self.write(*(boots or (DIRECT,)))
        self.model.mkdir()
        self.configure(**config)
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.fakes.vllm "$@"\n')
        self.python.chmod(0o755)
        self.always: tuple[str, ...] = ()  # arguments of every run

    def write(self, *boots: dict[str, Any]) -> None:
        self.plan.write_text(yaml.safe_dump({"title": "t", "model": str(self.model), "boots": list(boots)}))

    def configure(self, **config: Any) -> None:
        (self.model / "config.json").write_text(json.dumps(config))

    def command(self, *more: str) -> list[str]:
        where = ("--python", str(self.python), "--out", str(self.out), *self.always)
        return [sys.executable, "-m", "scripts.bench", str(self.plan), *where, *more]

    def run(self, *more: str) -> subprocess.CompletedProcess[str]:
        ran = subprocess.run(self.command(*more), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert "Traceback" not in ran.stderr, ran.stderr
        return ran

    def rows(self) -> dict[str, int]:
        """Row files by name with the time they were written."""
        return {path.name: path.stat().st_mtime_ns for path in self.out.glob("rows/*.json")}

    def summary(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return read


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def started(command: list[str], **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True, **more
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A run that is complete."""
    bench = Bench(tmp_path_factory.mktemp("bench"), DIRECT, {**UNKNOWN, "expect": "failure"})
    ran = bench.run()
    assert ran.returncode == 0, ran.stderr
    assert "/out: 3 of 3 measurements to make\n" in ran.stderr
    return bench


def test_a_step_that_was_meant_to_fail_is_told_and_costs_nothing(done: Bench) -> None:
    reason = "error: unrecognized arguments: --enable-paged-attn"
    assert done.summary()["failures"] == {}
    assert reason in done.summary()["failed_as_expected"]["unknown"]
    assert "Failed, and was meant to:\n\n- unknown: " in (done.out / "report.md").read_text()


def test_the_same_command_measures_nothing_twice_and_says_so(done: Bench) -> None:
    before = done.rows()
    again = done.run()
    assert again.returncode == 0
    assert re.search(
        r"/out: 0 of 3 .*; 2 are kept from an earlier run that ended 2\S+ \S+ UTC \(--fresh: anew\)", again.stderr
    )
    assert done.rows() == before


def test_a_report_is_dated_by_its_figures_not_by_its_printing(done: Bench) -> None:
    row = next(done.out.glob("rows/*.json"))
    kept = row.read_text()
    row.write_text(json.dumps({**json.loads(kept), "at": "2020-02-03T00:00:00+00:00"}))
    done.run()
    row.write_text(kept)
    assert done.summary()["date"].startswith("2020-02-03 to 20")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b.write({**DIRECT, "arguments": ["--max-num-seqs", "8"]}, {**UNKNOWN, "expect": "failure"}),
         "plan.boots.direct.arguments: nothing → --max-num-seqs 8"),
        (lambda b: b.configure(slots=8), ".config: "),
        (lambda b: b.python.write_text("#!/bin/sh\necho 0.33.0\n"), "engine.version: 0.32.0 → 0.33.0"),
        (lambda b: (b.plan.parent / "texts").write_text('{"prompt": "p", "output_tokens": 3}\n'), "texts: nothing → "),
    ],
    ids=["flags", "model", "version", "texts"],
)  # fmt: skip
def test_figures_of_other_conditions_are_never_shown_as_new(
    done: Bench, change: Callable[[Bench], None], says: str
) -> None:
    kept = {path: path.read_bytes() for path in (done.plan, done.python, done.model / "config.json")}
    summary = (done.out / "summary.json").read_text()
    change(done)
    texts = ("--texts", str(done.plan.parent / "texts")) if (done.plan.parent / "texts").exists() else ()
    try:
        for more in ((), ("--dry-run",)):
            ran = done.run(*texts, *more)
            assert ran.returncode == 2
            assert says in ran.stderr
            assert "--fresh moves them aside" in ran.stderr
            assert ran.stderr.count("\n") == 1
            assert ran.stdout == ""
        assert (done.out / "summary.json").read_text() == summary
    finally:
        (done.plan.parent / "texts").unlink(missing_ok=True)
        for path, content in kept.items():
            path.write_bytes(content)


def test_fresh_measures_anew_and_keeps_the_old_run_to_compare_with(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run()
    bench.configure(slots=8)
    ran = bench.run("--fresh")
    assert ran.returncode == 0, ran.stderr
    assert f"/out: 2 of 2 measurements to make; what was there is in {bench.out}.1\n" in ran.stderr
    assert compare.main([f"{bench.out}.1", str(bench.out)]) == 0


def test_a_step_that_was_meant_to_fail_and_does_not_is_a_failure(tmp_path: Path) -> None:
    row = {"name": "one", **ROW}
    boots = (
        {"name": "boot", "expect": "failure", "rows": [row]},
        {"name": "row", "rows": [{**row, "expect": "failure"}]},
    )
    bench = Bench(tmp_path, *boots)
    assert bench.run().returncode == 1
    assert bench.summary()["failures"] == {
        "boot": "meant to fail, and it came up",
        "row/one 1": "meant to fail, and 4 requests were answered",
    }


def test_what_is_not_there_is_one_line_before_anything_is_made(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for more, says in (
        (("--model", str(tmp_path / "none")), "no model in"),
        (("--python", "/nowhere/python"), "/nowhere/python has no vLLM: make .venv-engine/.installed"),
        (("--image", "none:0"), "the image none:0 is not here, or Docker does not answer"),
    ):
        ran = bench.run(*more)
        assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
        assert says in ran.stderr
        dry = bench.run(*more, "--dry-run")  # what would be measured can be told all the same
        assert (dry.returncode, dry.stdout) == (0, "direct/one 1/1\ndirect/two 1/1\n")
        assert dry.stderr.startswith("bench: not here yet, and needed to measure it: ")
        assert says in dry.stderr
    assert not bench.out.exists()


def test_a_missing_model_fails_its_own_step_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {**UNKNOWN, "name": "other", "arguments": [], "model": "/no/such"}, DIRECT)
    assert bench.run().returncode == 1
    assert "no model in /no/such" in bench.summary()["failures"]["other"]
    assert set(bench.summary()["rows"]) == {"direct/one", "direct/two"}
    assert "failed then and passed over: other (--retry: once more)" in bench.run().stderr


@pytest.mark.parametrize(
    ("by", "number"),
    [("make", signal.SIGTERM), ("make", signal.SIGINT), ("python", signal.SIGTERM), ("python", signal.SIGKILL)],
)
def test_a_run_ended_in_the_middle_leaves_no_process_and_goes_on(tmp_path: Path, number: int, by: str) -> None:
    bench = Bench(tmp_path, service_s=0.4, branch=True)
    command = bench.command()
    if by == "make":
        command = ["make", "--no-print-directory", "bench", f"PLAN={bench.plan}", f"ARGS={' '.join(command[4:])}"]
    run = started(command)
    until(lambda: bench.rows(), "the first row")
    family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    assert "sleep" in [process.name() for process in family]  # the engine's branch
    kept = bench.rows()
    time.sleep(0.3)  # into the second
    if by == "make" and number == signal.SIGINT:
        os.killpg(run.pid, number)  # as a terminal does; make alone hands on SIGTERM only
    else:
        run.send_signal(number)
    said = run.communicate(timeout=30)[1]
    assert not psutil.wait_procs(family, timeout=15)[1]
    assert "Traceback" not in said
    if number != signal.SIGKILL:
        assert "interrupted; the same command goes on, 1 left to measure" in said
        assert run.returncode == (128 + number if by == "python" else -number)
    assert list(bench.rows()) == list(kept)
    again = bench.run()
    assert again.returncode == 0, again.stderr
    assert "1 of 2 measurements to make; 1 are kept" in again.stderr
    assert set(bench.summary()["rows"]) == {"direct/one", "direct/two"}


def test_an_engine_killed_in_a_row_fails_its_step_and_leaves_no_half_figure(tmp_path: Path) -> None:
    bench = Bench(tmp_path, service_s=0.4)
    run = started(bench.command())
    until(lambda: bench.rows(), "the first row")
    time.sleep(0.5)  # two of the second's four requests are answered
    (engine,) = (p for p in psutil.Process(run.pid).children(recursive=True) if "tests.fakes.vllm" in p.cmdline()[2:3])
    engine.kill()
    said = run.communicate(timeout=30)[1]
    assert run.returncode == 1
    assert "direct failed and is passed over: gone during two 1: " in said
    assert "Traceback" not in said
    assert set(bench.summary()["rows"]) == {"direct/one"}
    assert bench.run().returncode == 1  # passed over, and still told
    assert bench.run("--retry").returncode == 0
    assert set(bench.summary()["rows"]) == {"direct/one", "direct/two"}


def test_a_folder_that_takes_no_more_is_one_line_and_the_run_goes_on_elsewhere(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, 16_384))  # rows fit, the report's pictures do not

    run = started(bench.command(), preexec_fn=small)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 1
    assert said.splitlines()[-1] == f"bench: {bench.out}: File too large; the same command goes on"
    assert not list(bench.out.rglob(".*"))
    again = bench.run()
    assert again.returncode == 0
    assert "0 of 2 measurements to make; 2 are kept" in again.stderr


def test_a_disk_that_is_full_from_the_start_leaves_a_folder_that_the_same_command_goes_on_with(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run()
    parts = [(bench.out / name).stat().st_size for name in ("plan.json", "conditions.json")]
    shutil.rmtree(bench.out)
    for limit in (min(parts) - 1, max(parts) - 1):  # none of the two fits, one does

        def small(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        run = started(bench.command(), preexec_fn=small)
        said = run.communicate(timeout=60)[1]
        assert (run.returncode, said) == (1, f"bench: {bench.out}: File too large; the same command goes on\n")
    assert bench.run().returncode == 0


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Bench, Callable[[], None]]]:
    """An engine that runs already, and a way to start it again on its port."""
    bench = Bench(tmp_path, {**DIRECT}, UNKNOWN)
    processes: list[subprocess.Popen[bytes]] = []
    port = 0

    def end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.communicate()

    def start() -> None:
        nonlocal port
        if processes:
            end(processes.pop())
        serve = [str(bench.python), "-m", "vllm.entrypoints.cli.main", "serve", str(bench.model), "--port", str(port)]
        process = subprocess.Popen(serve, cwd=ROOT, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(b":", 1)[1])

    try:
        start()
        bench.always = ("--engine", f"http://127.0.0.1:{port}", "--tokenizer", str(bench.model))
        yield bench, start
    finally:
        for process in processes:
            end(process)


def test_a_running_engine_is_asked_what_it_can_be_asked_and_another_start_of_it_is_noticed(
    running: tuple[Bench, Callable[[], None]],
) -> None:
    bench, start = running
    ran = bench.run()
    assert ran.returncode == 0, ran.stderr
    assert set(bench.summary()["rows"]) == {"direct/one", "direct/two"}  # the other step's flags are not this engine's
    start()
    ran = bench.run()
    assert ran.returncode == 2
    assert "engine.started: " in ran.stderr
    assert "--same-flags" in ran.stderr
    assert bench.run("--same-flags").returncode == 0
