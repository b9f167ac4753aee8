"""Promote, serve through the gateway on the real engine, revert: a user's way with a real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts import _ports, demo
from scripts.quantization.store import versions
from tests.quantize import conftest
from tests.quantize.conftest import NAME, PYTHON, Bench
from tests.quantize.versions import links

START_S = 400


@pytest.fixture(scope="module")
def home(bench: Bench, good: Path) -> Path:
    """The original is what is served first, as `make model` puts it there."""
    fetched = conftest.run(
        [str(PYTHON), "-m", "scripts.model_fetch_named", str(bench.original), "--as", NAME, "--json"],
        {"MODELS_DIR": str(bench.models)},
    )
    assert fetched.returncode == 0, fetched.stdout + fetched.stderr
    return good.parent


@contextmanager
def served(model: Path, folder: Path, *more: str) -> Iterator[httpx.Client]:
    """A client of the gateway, in front of an engine that serves `model`; both are gone afterwards."""
    ports = demo.Ports(_ports.free_port(), _ports.free_port(), _ports.free_port())
    running: list[subprocess.Popen[bytes]] = []
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    try:
        for service in demo.plan(ports, model, None).services:
            command = (*service.command, *more) if service.name == "engine" else service.command
            guard = (sys.executable, "-m", "scripts._guard", "--parent", str(os.getpid()), "--")
            with (folder / f"{service.name}.log").open("wb") as sink:
                running.append(
                    subprocess.Popen(
                        (*guard, *command),
                        env={**inherited, **service.env},
                        cwd=demo.ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=sink,
                        stderr=subprocess.STDOUT,
                    )
                )
        with httpx.Client(base_url=f"http://{_ports.HOST}:{ports.gateway}", timeout=120, trust_env=False) as client:

            def ready() -> bool:
                assert all(process.poll() is None for process in running), (folder / "engine.log").read_text()[-2000:]
                try:
                    return client.get("/readyz").status_code == 200
                except httpx.HTTPError:
                    return False

            conftest.until(ready, f"a ready gateway (logs in {folder})", START_S)
            yield client
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(20)


def chat(client: httpx.Client, text: str) -> dict[str, Any]:
    body = {"model": demo.MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 120}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_a_passed_version_is_promoted_and_answers_through_the_gateway(
    bench: Bench, home: Path, good: Path, tmp_path: Path
) -> None:
    """From the link that profiles name, with --quantization awq and bfloat16, as the profile says."""
    original = links(home)["current"]
    done = bench.script("promote", NAME, good.name, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["before"] == original
    assert links(home) == {"current": good.name, "previous": original}
    listed = bench.script("models", NAME, "--json")
    by_version = {found["version"]: found for found in json.loads(listed.stdout)["versions"]}
    assert (by_version[good.name]["current"], by_version[good.name]["verdict"]) == (True, "PASS")
    with served(home / "current", tmp_path, "--quantization", "awq") as client:
        choice = chat(client, "What is the capital of France?")
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert "bfloat16" in (tmp_path / "engine.log").read_text(encoding="utf-8", errors="replace")


def test_a_revert_tries_the_version_before_and_serves_it_again(
    bench: Bench, home: Path, good: Path, summary: dict[str, Any]
) -> None:
    before = links(home)
    assert before["current"] == good.name
    done = bench.script("revert", NAME, "--engine", "local", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert links(home) == {"current": before["previous"], "previous": good.name}
    summary["reverted"] = json.loads(done.stdout)["engine"]


@pytest.mark.full
def test_a_revert_to_a_version_that_does_not_answer_well_changes_nothing(bench: Bench, home: Path, good: Path) -> None:
    """The version before is whole and starts, but what it says is not what the gate had heard."""
    (stock,) = (found.path for found in versions(bench.models, "smollm2-135m-stock"))
    assert stock.is_dir()
    bad = bench.models / "other" / "aaaaaaaaaaaa"
    bad.parent.mkdir()
    bad.symlink_to(stock, target_is_directory=True)
    (bad.parent / "previous").symlink_to(bad.name)
    (bad.parent / good.name).symlink_to(good, target_is_directory=True)
    (bad.parent / "current").symlink_to(good.name)
    done = bench.script("revert", "other", "--engine", "local")
    assert done.returncode == 1
    assert links(bad.parent)["current"] == good.name
    assert "the answer to" in done.stderr
