"""Another engine under a running load: the release before, the pinned one again, one that dies, a kill -9 midway."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.stack import engines
from tests.stack.checkout import Stack, until
from tests.stack.load import ANSWERED, Load
from tests.stack.test_2_faults import ENGINE_HEALS_S, engine_ready, settle

PINNED = "vllm-stack/engine-cpu:0.32.0"
OLDER = f"vllm-stack/engine-cpu:{engines.OLDER}"
# Above an engine's start on a machine that does other things, too: what is claimed is that nobody fails meanwhile.
PATIENCE = "timeouts:\n  reload_wait_s: 400\n"


@pytest.fixture(scope="module", autouse=True)
def _patient(stack: Stack) -> Iterator[None]:
    path = stack.root / "configs/gateway.yaml"
    good = path.read_text(encoding="utf-8")
    path.write_text(good.replace("timeouts:\n", PATIENCE), encoding="utf-8")
    assert stack.compose("restart", "gateway").returncode == 0
    engines.older_image(stack)
    yield
    path.write_text(good, encoding="utf-8")
    assert stack.compose("restart", "gateway").returncode == 0


@pytest.fixture(autouse=True)
def _whole(stack: Stack) -> None:
    until(lambda: engine_ready(stack), "a ready engine", ENGINE_HEALS_S)


def version(stack: Stack) -> str:
    """What the engine says of itself, over HTTP."""
    source = "import urllib.request; print(urllib.request.urlopen('http://engine:8000/version').read().decode())"
    found = re.search(r"\d+\.\d+\.\d+", stack.python("gateway", source))
    assert found is not None
    return found[0]


def recorded(stack: Stack) -> str | None:
    found = re.findall(r"^ENGINE_CPU_IMAGE=(.*)$", (stack.root / ".env").read_text(encoding="utf-8"), re.MULTILINE)
    return str(found[-1]) if found else None


def note(summary: dict[str, Any], name: str, load: Load, since_s: float, took_s: float) -> dict[str, int]:
    outcomes = load.outcomes(since_s)
    summary.setdefault("upgrades", {})[name] = {
        "took_s": round(took_s, 1), "clients_saw": outcomes, "longest_answered_s": round(load.longest_s(since_s), 1),
    }  # fmt: skip
    return outcomes


@pytest.mark.parametrize(("image", "release"), [(OLDER, engines.OLDER), (PINNED, "0.32.0")])
def test_another_release_takes_over_and_no_request_fails(
    stack: Stack, summary: dict[str, Any], image: str, release: str
) -> None:
    """Both ways between two real releases: down to the one before, and up again."""
    before = version(stack)
    with Load(stack) as load:
        began_s = settle(load)
        done = stack.make("upgrade", ENGINE_IMAGE=image)
        took_s = time.monotonic() - began_s
        assert done.returncode == 0, done.stdout + done.stderr
        answered = len(load.seen)
        until(lambda: len(load.seen) >= answered + 6, "answers by the new engine", 120)
        outcomes = note(summary, f"{before} to {release}", load, began_s, took_s)
    assert set(outcomes) == {ANSWERED}
    assert version(stack) == release
    assert recorded(stack) == image
    assert "held: a chat was answered" in done.stdout
    assert not (stack.root / ".stack/swap.json").exists()


def test_a_second_up_keeps_what_was_upgraded_to(stack: Stack) -> None:
    """What runs is what .env says: the next `make up` changes nothing, and builds nothing under the other name."""
    before = stack.inspect("engine-cpu")["Id"]
    up = stack.make("up-cpu")
    assert up.returncode == 0, up.stderr
    assert stack.inspect("engine-cpu")["Id"] == before


def test_an_engine_that_dies_is_taken_back_and_no_request_fails(stack: Stack, summary: dict[str, Any]) -> None:
    image = engines.dying_image(stack)
    with Load(stack) as load:
        began_s = settle(load)
        failed = stack.make("upgrade", ENGINE_IMAGE=image)
        took_s = time.monotonic() - began_s
        answered = len(load.seen)
        until(lambda: len(load.seen) >= answered + 6, "answers by the old engine", 120)
        outcomes = note(summary, "an engine that dies", load, began_s, took_s)
    assert failed.returncode != 0
    assert "going back: the engine did not start (1 of 3 times): " in failed.stdout
    assert "the engine did not start" in failed.stderr.splitlines()[0]
    assert "Traceback" not in failed.stderr
    assert set(outcomes) == {ANSWERED}
    assert version(stack) == "0.32.0"
    assert recorded(stack) == PINNED


def test_what_cannot_work_is_refused_before_anything_is_touched(stack: Stack) -> None:
    """An image that nobody has, and a profile with a key that the new image's parser does not know."""
    before = stack.inspect("engine-cpu")["Id"]
    absent = stack.make("upgrade", ENGINE_IMAGE="vllm-stack/engine-cpu:9.9.9")
    assert absent.returncode != 0
    assert "vllm-stack/engine-cpu:9.9.9 can't be pulled" in absent.stderr
    profile = stack.root / "configs/engine/smollm2-135m.cpu.yaml"
    good = profile.read_text(encoding="utf-8")
    try:
        profile.write_text(good + "max-num-queued-tokenz: 5\n", encoding="utf-8")
        refused = stack.make("upgrade", ENGINE_IMAGE=OLDER)
    finally:
        profile.write_text(good, encoding="utf-8")
    assert refused.returncode != 0
    assert "max-num-queued-tokenz" in refused.stdout + refused.stderr
    assert stack.inspect("engine-cpu")["Id"] == before
    assert recorded(stack) == PINNED


def test_an_upgrade_that_was_killed_is_taken_back_by_the_next_command(stack: Stack) -> None:
    """kill -9 while the engine is away: `make upgrade` says what it finds, and goes back before it does anything."""
    environment = {**os.environ, **stack.env, "ENGINE_IMAGE": OLDER}
    command = [".venv/bin/python", "-m", "scripts.upgrade", OLDER]
    images = ("ps", "--all", "--format", "{{.Image}}", "engine-cpu")  # for a moment there are two containers
    with subprocess.Popen(command, cwd=stack.root, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if "stopping the old one" in line:
                    break
            until(lambda: OLDER in stack.compose(*images).stdout, "the new container", 120)
        finally:
            process.send_signal(signal.SIGKILL)
    assert stack.http.get(f"{stack.url}/readyz").status_code == 503
    again = stack.make("upgrade", ENGINE_IMAGE=PINNED)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"found an interrupted change (changing): engine-cpu: {PINNED} -> {OLDER}" in again.stdout
    assert "nothing to do: that image is what runs" in again.stdout
    until(lambda: engine_ready(stack), "a gateway that sends again", 30)
    assert version(stack) == "0.32.0"
    assert stack.chat().status_code == 200
