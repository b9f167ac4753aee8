"""A hub on this machine for tests, and what a fetch from it leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import models_hub
from tests.fakes import checkpoint
from tests.fakes.hub import Hub, Repo, serve

NAME = "acme/Tiny-Chat"
TOKEN = "hf_" + "Secret0Secret1Secret"
WAIT = threading.Event()


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serve() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """It holds one whole model; models and secrets are in tmp_path."""
    server.repos = {NAME: Repo(checkpoint.files() | {"pytorch_model.bin": b"pickle", "README.md": b"card"})}
    server.valid, server.seen = {TOKEN}, []
    server.faults.clear()
    server.go.clear()
    server.holding.clear()
    for name in ("HF_TOKEN", "HF_TOKEN_FILE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("SECRETS_DIR", str(tmp_path / "secrets"))
    monkeypatch.setattr(models_hub, "PAUSE_S", 0.001)
    return server


def tree(root: Path) -> set[str]:
    """All files below, links as such, without the lock."""
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or not path.is_dir()}
    return {name for name in found if not name.endswith(".lock")}


def give_token(tmp_path: Path) -> Path:
    path = tmp_path / "secrets" / "private" / "hf_token"
    path.parent.mkdir(parents=True)
    path.write_text(f"{TOKEN}\n")
    return path


def said(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert TOKEN not in out + err
    assert "s3cr3t" not in out + err, "a signed address is a secret too"
    return err
