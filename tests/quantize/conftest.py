"""A real small model, quantized by the job and judged by the gate, each once for the whole session.

What takes minutes more is marked `full`; the rest is `-m ci`. What was measured goes to results/quantize.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import model_fetch
from scripts.quantization import gate_config, gate_run
from scripts.quantization.gate_config import GateConfig
from scripts.quantization.gate_engine import Local
from scripts.quantization.manifest import read
from scripts.quantization.scoring import Scores

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv/bin/python"
QUANTIZE_PYTHON = ROOT / ".venv-quantize/bin/python"
SUMMARY = ROOT / "results" / "quantize.json"
PART = ROOT / "results" / "quantize-part.json"  # of a run that chose among the tests
NAME = "smollm2-135m-awq"
TEXTS = ROOT / "configs/quantize/texts/conversations.jsonl"  # this project's own: nothing to download
# For two shared cores: enough for figures that tell good from spoilt.
TEXT = {"window_tokens": 512, "max_tokens": 3072, "min_tokens": 2048, "listed": 64}
SPEED = {"tokens": 32, "together": 4, "repeats": 1}  # of a part of the tests: that it is measured at all


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: takes minutes; not of the seven that every commit gets")
    config.addinivalue_line("markers", "ci: all the others (make test-quantize ARGS='-m ci')")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("full") is None:
            item.add_marker("ci")


@dataclass
class Bench:
    """Where everything of a session is. `job` and `gate` are the commands as a user runs them."""

    models: Path
    folder: Path
    original: Path
    texts: Path
    config: GateConfig
    config_file: Path
    summary: dict[str, Any]
    sides: dict[Path, Scores] = field(default_factory=dict)

    def job(self, name: str, *more: str, env: dict[str, str] | None = None, **changes: Any) -> Any:
        """Runs the quantization job on the small model; its JSON. `changes`: other values of its configuration."""
        done = self.run_job(name, *more, env=env, **changes)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def run_job(
        self, name: str, *more: str, env: dict[str, str] | None = None, **changes: Any
    ) -> subprocess.CompletedProcess[str]:
        path = self.write_config(name, **changes)
        command = [str(QUANTIZE_PYTHON), "-m", "scripts.quantize", "--config", str(path), "--models", str(self.models)]
        return run([*command, "--json", *more], env or {})

    def write_config(self, name: str, **changes: Any) -> Path:
        """configs/quantize/<name>.yaml of this session."""
        wanted: dict[str, Any] = {
            "name": name,
            "source": {"model": str(self.original)},
            "weights": {"group_size": 64},  # its hidden size is 576
            "calibration": {"source": str(self.texts), "blocks": 4, "block_tokens": 256, "held_out_tokens": 3072},
            "device": "cpu",
            "clip_tokens": 16,  # nine tenths of the time go into that search
        }
        for key, value in changes.items():
            wanted[key] = {**wanted[key], **value} if isinstance(value, dict) and key in wanted else value
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(wanted), encoding="utf-8")
        return path

    def script(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """python -m scripts.NAME; an empty Docker, so that no stack of this machine is concerned."""
        env = {"MODELS_DIR": str(self.models), "DOCKER_HOST": f"unix://{self.folder}/no-docker"}
        return run([str(PYTHON), "-m", f"scripts.{name}", *arguments], env)

    def measure(self, version: Path) -> Scores:
        """A side through the real engine, each once a session."""
        manifest = read(version)
        plan = gate_run.plan(self.models, manifest.name, version.name, None, self.config)
        if plan.original not in self.sides:
            self.sides[plan.original] = self._measure(plan.original, plan.texts, None)
        if version not in self.sides:
            self.sides[version] = self._measure(version, plan.texts, self.sides[plan.original])
        return self.sides[version]

    def _measure(self, model: Path, texts: tuple[str, ...], like: Scores | None) -> Scores:
        return gate_run.measure(model, texts, like, Local(), self.config, lambda text: None)

    def judge(self, version: Path) -> gate_run.Result:
        """As the gate does, with the original measured once for all."""
        manifest = read(version)
        plan = gate_run.plan(self.models, manifest.name, version.name, None, self.config)
        artifact = self.measure(version)
        original = self.sides[plan.original]
        return gate_run.conclude(plan, original, artifact, self.config, artifact.seconds)


def run(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, errors="replace", check=False
    )


def in_part(config: pytest.Config) -> bool:
    """Whether this run chose among the tests."""
    return bool(config.getoption("markexpr") or config.getoption("keyword"))


@pytest.fixture(scope="session")
def summary(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What the tests measured; written to results/ at the end."""
    found: dict[str, Any] = {}
    yield found
    path = PART if in_part(request.config) else SUMMARY
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, summary: dict[str, Any], request: pytest.FixtureRequest) -> Bench:
    original = model_fetch.model_dir()
    assert not model_fetch.plan(original).fetch, f"the model is not in {original}: make model"
    folder = tmp_path_factory.mktemp("quantize")
    shipped = yaml.safe_load((ROOT / gate_config.PATH).read_text(encoding="utf-8"))
    path = folder / "gate.yaml"
    changed = {"text": TEXT, **({"speed": SPEED} if in_part(request.config) else {})}
    path.write_text(yaml.safe_dump({**shipped, **changed}), encoding="utf-8")
    models = folder / "models"
    models.mkdir()
    texts = Path(shutil.copy(TEXTS, folder))
    return Bench(models, folder, original, texts, gate_config.load(path), path, summary)


@pytest.fixture(scope="session")
def good(bench: Bench) -> Path:
    """The small model, quantized by autoawq on the CPU."""
    made = bench.job(NAME)
    manifest = read(Path(made["directory"]))
    bench.summary["autoawq"] = {
        "seconds": made["s"],
        "peak_ram_mib": round(manifest.run.peak_ram_bytes / 2**20),
        "calibration_tokens": manifest.calibration.tokens,
        "weights_mib": round(manifest.weight_bytes / 2**20),
    }
    return Path(made["directory"])


def note(summary: dict[str, Any], name: str, result: gate_run.Result) -> None:
    """A verdict with its figures into the summary."""
    figures = result.figures
    assert figures is not None
    summary.setdefault("verdicts", {})[name] = {
        "verdict": result.judgement.verdict,
        "reasons": list(result.judgement.reasons),
        **{
            key: round(value, 4)
            for key, value in {**dataclasses.asdict(figures), "ppl_rise": figures.ppl_rise}.items()
            if not isinstance(value, tuple)
        },
    }


def until(condition: Callable[[], object], what: str, limit_s: float) -> None:
    """Polls; a condition that never holds fails the test by name."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not seen within {limit_s} s: {what}"
        time.sleep(0.05)
