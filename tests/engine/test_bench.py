"""The benchmark on a real engine: what its reports hold, what an interruption leaves, what a failing step does."""

from __future__ import annotations

import json
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
from scripts.bench import compare
from tests.engine.conftest import Stack, until

ROOT = Path(__file__).parent.parent.parent
SMOKE = "configs/bench/smoke.yaml"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "scripts.bench", *arguments]


def attached(stack: Stack, out: Path, plan: str) -> list[str]:
    where = ("--engine", stack.engine_url, "--gateway", stack.url, "--tokenizer", str(model_fetch.model_dir()))
    return command(plan, *where, "--out", str(out))


@pytest.fixture(scope="module")
def measured(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run ended by SIGTERM after its first measurement, and gone on with; (folder, what the first one said)."""
    folder = tmp_path_factory.mktemp("bench")
    out = folder / "out"
    run = attached(stack, out, SMOKE)  # its step with a flag of its own is left out: a running engine keeps its flags
    first = subprocess.Popen(run, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 240
    while not list(out.glob("rows/*.json")) and time.monotonic() < until:
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.05)
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=60)[1]
    assert first.returncode == 128 + signal.SIGTERM, said
    assert not psutil.wait_procs(children, timeout=10)[1]
    kept = {path: path.stat().st_mtime_ns for path in out.glob("rows/*.json")}
    second = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert second.returncode == 0, second.stderr
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # not measured twice
    return out, said


def summary(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return read


def test_an_interrupted_run_says_what_is_left_and_goes_on(measured: tuple[Path, str]) -> None:
    assert "interrupted; the same command goes on, " in measured[1]


def test_every_measurement_is_there_with_all_requests_answered(measured: tuple[Path, str]) -> None:
    rows = summary(measured[0])["rows"]
    assert set(rows) == {f"direct/{name}" for name in ("chat", "prefix", "open", "whole", "whole-gateway")}
    assert all(row["failed"] == 0 for row in rows.values())
    assert rows["direct/whole"]["requests_per_s"]["repeats"] == 2


def test_the_prefix_cache_is_measured_where_it_should_be_and_nowhere_else(measured: tuple[Path, str]) -> None:
    rows = summary(measured[0])["rows"]
    for name in ("chat", "open", "whole"):
        assert rows[f"direct/{name}"]["prefix_hit_ratio"] < 0.05, name
    assert rows["direct/prefix"]["prefix_hit_ratio"] > 0.2
    series = json.loads(next(measured[0].glob("rows/*.prefix.0.json")).read_text())["engine"]["series"]
    assert 0.2 < series[-1]["hit_ratio"] < 1
    assert series[-1]["kv_usage"] >= 0


def test_tokens_are_the_engines_own_count(measured: tuple[Path, str]) -> None:
    for path in measured[0].glob("rows/*.json"):
        row = json.loads(path.read_text())
        # The gateway beside it asks an engine that made no progress for one token now and then.
        assert 0 <= row["engine"]["generation_tokens"] - row["generation_tokens"] <= 5, path.name


def test_the_time_to_first_token_agrees_with_the_engines_own(measured: tuple[Path, str]) -> None:
    row = json.loads(next(measured[0].glob("rows/*.chat.0.json")).read_text())
    assert row["ttft_ms"]["0"] <= row["engine"]["ttft_mean_ms"] <= row["ttft_ms"]["100"]


def test_the_report_names_version_and_machine(measured: tuple[Path, str]) -> None:
    text = (measured[0] / "report.md").read_text()
    assert "vLLM 0.32.0." in text
    assert "no GPU; " in text
    assert "gateway_over_direct" in text
    assert "| direct/whole-gateway | " in text.partition("over the step before")[2]
    assert (measured[0] / "report.html").read_text().count("data:image/png;base64,") == 4


def test_a_run_compared_with_itself_changed_nothing(
    measured: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([str(measured[0]), str(measured[0]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differs"] == []
    assert set(found["rows"]) == set(summary(measured[0])["rows"])
    assert not any(row["shown"] for row in found["rows"].values())


def test_engines_side_by_side_are_measured_and_one_that_cannot_start_is_told_in_its_own_words(tmp_path: Path) -> None:
    smoke, out = yaml.safe_load((ROOT / SMOKE).read_text()), tmp_path / "out"
    fine, unknown = smoke["boots"]
    one = {"name": "one", "workload": "short", "requests": 2, "in_flight": 2, "repeats": 2}
    boots = [{**unknown, "expect": "success"}, {**fine, "rows": [one, {**one, "name": "two", "through": "gateway"}]}]
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({**smoke, "together": True, "boots": boots, "ratios": [], "ladder": []}))
    ran = subprocess.run(
        command(str(plan), "--out", str(out)), cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 1, ran.stderr
    assert "error: unrecognized arguments: --enable-paged-attn" in summary(out)["failures"]["unknown-flag"]
    assert "--enable-paged-attn" in (out / "report.md").read_text()
    rows = summary(out)["rows"]
    assert {name: row["requests_per_s"]["repeats"] for name, row in rows.items()} == {"direct/one": 2, "direct/two": 2}


def test_no_server_there_is_one_line_and_nothing_measured(tmp_path: Path) -> None:
    where = ("--engine", "http://127.0.0.1:9", "--tokenizer", str(model_fetch.model_dir()))
    run = command(SMOKE, *where, "--out", str(tmp_path / "o"))
    ran = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert "http://127.0.0.1:9 does not answer as a vLLM server does" in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_a_tokenizer_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    run = command(SMOKE, "--engine", "http://127.0.0.1:9", "--tokenizer", "x", "--out", str(tmp_path / "o"))
    ran = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("bench: --tokenizer: no model in x: there is no such directory")
    assert ran.stderr.count("\n") == 1


def test_a_load_generator_that_is_killed_is_named_and_the_row_can_be_measured_again(
    stack: Stack, tmp_path: Path
) -> None:
    """The kernel kills the greediest process when memory is short."""
    row = {"name": "chat", "workload": "chat", "requests": 64, "in_flight": 4, "repeats": 1}
    plan, out = tmp_path / "plan.yaml", tmp_path / "out"
    plan.write_text(yaml.safe_dump({"title": "t", "model": "m", "boots": [{"name": "here", "rows": [row]}]}))
    run = subprocess.Popen(attached(stack, out, str(plan)), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    until(lambda: stack.engine_metric("vllm:num_requests_running") > 0, "requests in flight", 240)
    (generator,) = (p for p in psutil.Process(run.pid).children() if "resident.py" in " ".join(p.cmdline()))
    generator.kill()
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 1
    assert "here/chat 1/1: vllm bench serve was killed by signal 9, as the kernel does when memory is short" in said
    assert "Traceback" not in said
    again = subprocess.run(
        [*attached(stack, out, str(plan)), "--retry", "--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (again.returncode, again.stdout) == (0, "here/chat 1/1\n"), again.stderr
