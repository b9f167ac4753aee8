"""promote, revert, models and gate as a user runs them, on small versions; no engine is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.quantization import store
from scripts.quantization.promotion import plan_promotion
from tests.quantize import versions
from tests.quantize.versions import links


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


def promote(models: Path) -> None:
    move = plan_promotion(models, "m", None)
    assert move is not None
    move.apply()


def command(models: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script as a user runs it. An empty PATH: no Docker answers, so no engine is concerned."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env={**os.environ, "MODELS_DIR": str(models), "PATH": str(models)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_promote_says_what_it_did_and_dry_run_does_nothing(models: Path) -> None:
    versions.make(models, "m", "aaaaaaaaaaaa")
    dry = command(models, "scripts.promote", "m", "--dry-run")
    assert (dry.returncode, links(models / "m")) == (0, {}), dry.stderr
    assert "would serve aaaaaaaaaaaa" in dry.stdout
    done = command(models, "scripts.promote", "m", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == "aaaaaaaaaaaa"
    assert links(models / "m") == {"current": "aaaaaaaaaaaa"}
    again = command(models, "scripts.promote", "m")
    assert (again.returncode, "is what is served already" in again.stdout) == (0, True)


def test_while_one_is_promoting_another_one_is_told_so(models: Path) -> None:
    versions.make(models, "m", "aaaaaaaaaaaa")
    with store.alone(models / "m"):
        for name in ("promote", "revert"):
            second = command(models, f"scripts.{name}", "m")
            assert second.returncode == 1
            assert second.stderr.strip().endswith("is promoting or reverting m: wait for its end")
            assert str(os.getpid()) in second.stderr
    assert links(models / "m") == {}
    assert command(models, "scripts.promote", "m").returncode == 0


def test_a_refusal_is_one_line_and_exit_code_1(models: Path) -> None:
    versions.make(models, "m", "aaaaaaaaaaaa", verdict="FAIL")
    for line in (["promote", "m"], ["promote", "x"], ["revert", "m"], ["revert", "x"], ["gate", "x"], ["models", "x"]):
        refused = command(models, f"scripts.{line[0]}", line[1])
        assert refused.returncode == 1
        assert len(refused.stderr.splitlines()) == 1, refused.stderr
        assert refused.stderr.startswith(f"{line[0]}: ")


def test_models_lists_versions_with_their_figures_and_what_is_wrong(models: Path) -> None:
    versions.make(models, "m", "aaaaaaaaaaaa")
    promote(models)
    versions.make(models, "m", "bbbbbbbbbbbb", b"other", verdict="FAIL")
    listed = command(models, "scripts.models")
    assert listed.returncode == 0, listed.stderr
    served, failed = listed.stdout.splitlines()[2:]
    assert served.split()[:2] == ["served", "aaaaaaaaaaaa"]
    assert {"PASS", "+15.9%", "0.150", "0.820", "200"} <= set(served.split())
    assert "FAIL" in failed
    (models / "m/previous").symlink_to("gone")
    wrong = command(models, "scripts.models", "--json")
    assert wrong.returncode == 1
    assert "leads to gone" in json.loads(wrong.stdout)["problems"][0]
    (models / "m/bbbbbbbbbbbb/manifest.json").write_text("{", encoding="utf-8")
    assert "is no manifest" in command(models, "scripts.models", "m").stderr


def test_a_full_disk_leaves_the_link_as_it_was(models: Path) -> None:
    """On a file system without one free inode, in a namespace of its own."""
    versions.make(models, "m", "aaaaaaaaaaaa")
    script = f"""
        mount -t tmpfs -o size=8m,nr_inodes=24 none {models.parent} && cd {models.parent}
        mkdir -p copy && {sys.executable} - <<'END'
import sys
sys.path.insert(0, {str(Path.cwd())!r})
from pathlib import Path
from tests.quantize import versions
from tests.quantize.versions import links
from scripts.quantization.promotion import plan_promotion
models = Path({str(models.parent)!r}) / "copy"
for digest in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
    versions.make(models, "m", digest, digest.encode())
    if digest[0] == "a":
        plan_promotion(models, "m", digest).apply()
move = plan_promotion(models, "m", "b")
try:
    for number in range(100):
        (models / str(number)).touch()
except OSError:
    pass
try:
    move.apply()
except OSError as error:
    print(error.strerror, links(models / "m"))
END
    """
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "bash", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "No space left on device {'current': 'aaaaaaaaaaaa'}", done.stderr


def test_a_full_disk_leaves_the_verdict_as_it_was(models: Path) -> None:
    """No room for the report nor the manifest: both are as before, and nothing half-written is left."""
    versions.make(models, "m", "aaaaaaaaaaaa")
    script = f"""
        mount -t tmpfs -o size=200k none {models.parent} && cd {models.parent} && {sys.executable} - <<'END'
import sys
sys.path.insert(0, {str(Path.cwd())!r})
from pathlib import Path
from tests.quantize import versions
from scripts.quantization import gate_config, gate_run
from scripts.quantization.gate import Judgement
from scripts.quantization.manifest import read
path = versions.make(Path("copy"), "m", "aaaaaaaaaaaa")
before = read(path)
size = gate_config.load(Path({str(Path.cwd() / "configs/quantize/gate.yaml")!r})).sizes[0]
plan = gate_run.Plan(path, before, path, size, ())
result = gate_run.Result(plan, Judgement("FAIL", ("x",), ()), None, (), None, None, 1.0)
try:
    with open("filler", "wb") as file:
        while True:
            file.write(b"0" * 512)
            file.flush()
except OSError:
    pass
try:
    gate_run.keep(result, versions.gate(before, "FAIL"))
except OSError as error:
    left = [file.name for file in path.iterdir() if file.name.endswith(".part")]
    print(error.strerror, read(path) == before, left)
END
    """
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "bash", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "No space left on device True []", done.stdout + done.stderr
