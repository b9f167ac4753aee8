"""The demo's plan, its guard, and its endings: whatever happens, one line says why and nothing is left.

The processes are real: honcho, the guard, the gateway. Only the engine is the scripted one, which starts in a second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest
import yaml
from honcho.printer import Message

from scripts import _demo_talk, _ports, _prometheus, demo
from scripts._demo_logs import Logs

ROOT = Path(demo.ROOT)


def until(condition: Callable[[], object], what: str, limit_s: float = 20) -> None:
    """Polls; a condition that never holds fails the test by name."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not seen within {limit_s} s: {what}"
        time.sleep(0.02)


def running(marker: str) -> list[str]:
    """The command lines of processes that carry the marker, zombies not counted."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if marker in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_the_plan_binds_everything_to_loopback_and_points_each_part_at_its_neighbour() -> None:
    chosen = demo.plan(demo.Ports(1080, 1900, 1800, 1909), Path("/models/m"), Path("/usr/bin/prometheus"))
    engine, gateway, prometheus = chosen.services
    assert engine.command[1:5] == ("serve", "/models/m", "--config", demo.PROFILE)
    assert engine.command[-4:] == ("--host", "127.0.0.1", "--port", "1800")
    assert gateway.env["GATEWAY__LISTEN"] == "127.0.0.1:1080"
    assert json.loads(gateway.env["GATEWAY__ENGINES"]) == ["http://127.0.0.1:1800"]
    assert "127.0.0.1:1909" in prometheus.command


def test_without_prometheus_the_plan_is_engine_and_gateway() -> None:
    chosen = demo.plan(demo.Ports(), Path("/m"), None)
    assert [service.name for service in chosen.services] == ["engine", "gateway"]


def test_the_profile_the_plan_names_exists_and_serves_the_name_the_demo_asks_for() -> None:
    profile = yaml.safe_load((ROOT / demo.PROFILE).read_text())
    assert profile["served-model-name"] == demo.MODEL


def test_prometheus_gets_the_projects_jobs_at_the_demos_addresses() -> None:
    source = yaml.safe_load((ROOT / _prometheus.CONFIG).read_text())
    filled = _prometheus.configuration(source, {"engine": "h:1", "gateway": "h:2"}, "1s")
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in filled["scrape_configs"]}
    assert targets == {"engine": ["h:1"], "gateway": ["h:2"]}
    assert filled["global"]["scrape_interval"] == "1s"
    assert [len(list(Path(p).parent.glob(Path(p).name))) for p in filled["rule_files"]] == [6]
    assert "alerting" not in filled
    assert source["scrape_configs"][0]["static_configs"][0]["targets"] != ["h:1"]


def test_the_lines_to_copy_are_not_indented_and_the_shell_and_python_take_them() -> None:
    text = _demo_talk.recipes("http://127.0.0.1:8080", "m")
    assert not [line for line in text.splitlines() if line.startswith(" ")]
    assert (
        subprocess.run(["bash", "-n"], input="\n".join(text.splitlines()[2:6]), text=True, check=False).returncode == 0
    )
    compile(text.partition("-c '")[2].rpartition("'")[0], "recipe", "exec")


# -- what the logs tell ------------------------------------------------------------------------------------------------


def said(folder: Path, *lines: str, name: str = "engine") -> Logs:
    logs = Logs(folder, on_start=lambda: None)
    for line in lines:
        logs.write(Message("line", line + "\n", datetime.now(), name, None))  # noqa: DTZ005  # honcho's own
    return logs


def test_the_cause_is_the_first_error_not_the_later_ones_that_point_back_to_it(tmp_path: Path) -> None:
    logs = said(
        tmp_path,
        "(APIServer pid=1) WARNING 11-30 [u.py:255] Found ulimit of 20000: `OSError: [Errno 24] Too many open files`.",
        "(Worker pid=2) ERROR 11-30 [m.py:9] Traceback (most recent call last):",
        "(Worker pid=2) ERROR 11-30 [m.py:9] ValueError: No common block size for 16",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    )
    assert logs.why("engine", 1) == "ValueError: No common block size for 16"


@pytest.mark.parametrize(
    ("code", "lines", "why"),
    [
        (137, [], "was the memory full?"),
        (134, [], "ended by SIGABRT"),
        (1, ["OSError: [Errno 28] No space left on device: '/x'"], "no space left on the disk"),
        (1, ["gateway: listen = 'x': expected host:port"], "gateway: listen = 'x': expected host:port"),
        (1, [], "it said nothing"),
    ],
)
def test_every_end_has_a_cause(tmp_path: Path, code: int, lines: list[str], why: str) -> None:
    assert why in said(tmp_path, *lines).why("engine", code)


def test_the_engines_log_lines_become_phases_and_the_size_of_the_kv_cache(tmp_path: Path) -> None:
    logs = said(tmp_path, "(Worker pid=1) INFO [c.py:68] Starting to load model /m...")
    assert logs.phase == "loading the weights"
    logs = said(tmp_path, "(EngineCore pid=1) INFO [kv.py:1] CPU KV cache size: 23,296 tokens, Maximum concurrency …")
    assert logs.kv_tokens == "23,296"


# -- the guard ---------------------------------------------------------------------------------------------------------

# A trunk with a branch in a session of its own that ignores SIGTERM: what a killed vLLM leaves behind, and worse.
TREE = """
import os, signal, subprocess, sys, time
branch = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", branch, sys.argv[1]], start_new_session=True)
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def marker() -> Iterator[str]:
    """A word in the command lines of one test's processes; whatever carries it afterwards is killed, and a failure."""
    word = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    yield word
    left = running(word)
    for process in psutil.process_iter(["cmdline"]):
        if word in " ".join(process.info["cmdline"] or ()):
            process.kill()
    assert not left


def guarded(marker: str, *, parent: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "scripts._guard", "--parent", str(parent or os.getpid()), "--grace", "2", "--"]
    process = subprocess.Popen(
        [*command, sys.executable, "-c", TREE, marker], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.stdout.close()
    return process


def trunk(guard: subprocess.Popen[str]) -> psutil.Process:
    return psutil.Process(guard.pid).children()[0]


def test_the_guard_kills_the_branches_of_a_killed_trunk(marker: str) -> None:
    guard = guarded(marker)
    trunk(guard).kill()
    assert guard.wait(10) == 128 + signal.SIGKILL
    assert not running(marker)


def test_the_guard_asked_to_end_ends_the_whole_tree(marker: str) -> None:
    guard = guarded(marker)
    guard.terminate()
    assert guard.wait(10) == 128 + signal.SIGTERM
    assert not running(marker)


def test_the_guard_ends_the_whole_tree_when_the_watched_process_is_killed(marker: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as watched:
        guard = guarded(marker, parent=watched.pid)
        watched.kill()
    guard.wait(10)
    assert not running(marker)


def test_the_guard_hands_on_the_commands_exit_code() -> None:
    command = [sys.executable, "-m", "scripts._guard", "--", sys.executable, "-c", "raise SystemExit(7)"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 7


def test_the_guard_says_in_one_line_that_a_command_does_not_exist() -> None:
    command = [sys.executable, "-m", "scripts._guard", "--", "/no/such/program"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (127, "/no/such/program: No such file or directory\n")


# -- whole runs --------------------------------------------------------------------------------------------------------

RUN = """
import sys
from dataclasses import replace
from pathlib import Path
from scripts import demo, _demo_talk
folder, once, *engine = sys.argv[1:]
ports = demo.Ports({gateway}, {admin}, {engine})
chosen = demo.plan(ports, Path("/unused"), None)
service = demo.Service("engine", tuple(engine), {{}})
chosen = replace(chosen, services=(service, chosen.services[1]), folder=Path(folder), model="fake-8b")
demo.prepare(chosen)
sys.exit(demo.Demo(chosen, once == "once", _demo_talk.Terminal()).run())
"""


class Run:
    """The demo in a process of its own, with another engine. `text` is what it has printed so far."""

    def __init__(self, folder: Path, marker: str, engine: list[str] | None = None, once: bool = False) -> None:
        ports = {name: _ports.free_port() for name in ("gateway", "admin", "engine")}
        fake = [sys.executable, "-m", "tests.fakes.engine", "--port", str(ports["engine"]), "--token-s", "0.02"]
        self.folder = folder / marker
        self.ports = ports
        self._out = (folder / "out").open("w+")
        code = textwrap.dedent(RUN).format(**ports)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(self.folder), "once" if once else "stay", *(engine or fake)],
            stdout=self._out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        )

    @property
    def text(self) -> str:
        return Path(self._out.name).read_text()

    def seen(self, word: str) -> None:
        until(lambda: word in self.text, f"{word!r} in {self.text!r}")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> int:
        code = self.process.wait(20)
        self._out.close()
        return code


def gone(processes: list[psutil.Process]) -> None:
    """All of them ended, within the time a guard takes."""
    _, alive = psutil.wait_procs(processes, timeout=12)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_once_ends_with_0_after_both_answers_and_leaves_nothing(tmp_path: Path, marker: str) -> None:
    run = Run(tmp_path, marker, once=True)
    run.seen("model  ")
    processes = run.children()
    assert run.end() == 0, run.text
    assert run.text.count("TTFT") == 2
    assert "curl" not in run.text, "an address that is gone a moment later"
    assert "make demo, without --once, stays up" in run.text
    gone(processes)


def test_ctrl_c_after_the_answers_is_a_good_end(tmp_path: Path, marker: str) -> None:
    run = Run(tmp_path, marker)
    run.seen("Ctrl-C stops it")
    assert "curl http://127.0.0.1" in run.text
    processes = run.children()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0, run.text
    gone(processes)


@pytest.mark.parametrize(
    ("phase", "signum", "code"),
    [
        ("engine      starts", signal.SIGINT, 130),
        ("engine      up", signal.SIGINT, 130),
        ("model  ", signal.SIGINT, 130),
        ("model  ", signal.SIGTERM, 143),
    ],
)
def test_an_interruption_before_the_end_leaves_nothing_and_is_no_success(
    tmp_path: Path, marker: str, phase: str, signum: signal.Signals, code: int
) -> None:
    run = Run(tmp_path, marker)
    run.seen(phase)
    processes = run.children()
    run.process.send_signal(signum)
    assert run.end() == code, run.text
    assert "stopped before it had answered" in run.text
    gone(processes)


def test_sigkill_leaves_nothing(tmp_path: Path, marker: str) -> None:
    run = Run(tmp_path, marker)
    run.seen("model  ")
    processes = run.children()
    run.process.kill()
    run.end()
    gone(processes)


def test_an_engine_that_fails_to_start_is_one_line_with_its_cause_and_its_last_lines(
    tmp_path: Path, marker: str
) -> None:
    run = Run(tmp_path, marker, ["bash", "-c", "echo loading; echo 'ValueError: no such block size' >&2; exit 3"])
    assert run.end() == 1
    assert "demo: the engine stopped (exit code 3): ValueError: no such block size\n" in run.text
    assert f"more in {run.folder / 'engine.log'}" in run.text
    assert "Traceback" not in run.text


def test_an_engine_killed_while_serving_ends_the_demo_with_its_cause(tmp_path: Path, marker: str) -> None:
    run = Run(tmp_path, marker)
    run.seen("Ctrl-C stops it")
    processes = run.children()
    next(process for process in processes if process.cmdline()[1:3] == ["-m", "tests.fakes.engine"]).kill()
    assert run.end() == 1
    assert "demo: the engine stopped (exit code 137): killed" in run.text
    gone(processes)


def test_an_engine_killed_during_an_answer_is_named_rather_than_the_broken_stream(tmp_path: Path, marker: str) -> None:
    run = Run(tmp_path, marker)
    run.seen("model  ")
    engine = [process for process in run.children() if process.cmdline()[1:3] == ["-m", "tests.fakes.engine"]]
    engine[0].kill()
    assert run.end() == 1
    assert "demo: the engine stopped (exit code 137): killed" in run.text


def test_a_log_that_cannot_be_written_is_one_line(tmp_path: Path, marker: str) -> None:
    run = Run(
        tmp_path, marker, ["bash", "-c", 'mkdir "$0"; echo hello; sleep 60', str(tmp_path / marker / "engine.log")]
    )
    assert run.end() == 1
    assert run.text.splitlines()[-1] == f"demo: {run.folder / 'engine.log'}: Is a directory"


def test_bad_arguments_are_usage_errors() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.demo", "--port", "x"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_an_answer_is_wrapped_between_words_on_a_terminal_and_returned_as_it_came(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "25")
    text = _demo_talk.Terminal().stream(iter(["The", " capital", " of", " France", " is", "\n", "Par", "is."]))
    assert text == "The capital of France is\nParis."
    assert capsys.readouterr().out == ("  model  The capital of\n         France is\n         Paris.\n")


def test_without_prometheus_and_apt_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(_prometheus.MissingError, match="no apt-get"):
        _prometheus.find(tmp_path / "cache")


def test_apts_own_reason_is_handed_on_and_nothing_stays_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("apt-get", "dpkg-deb"):
        program = tmp_path / name
        program.write_text(
            "#!/bin/sh\necho 'W: old lists' >&2; echo 'E: Unable to locate package prometheus' >&2; exit 100\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(_prometheus.MissingError, match="apt-get says: Unable to locate package prometheus"):
        _prometheus.find(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
