"""Changing the running stack: the order of its steps, the way back, and what a killed one leaves to the next."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts import _journal, _swap
from scripts._compose import Compose, Container, plan_images
from scripts._journal import CHANGING, DRAINING, HELD, Journal, JournalError
from scripts._running import Stack, SwapError
from scripts._swap import NotBackError, heal, swap

JOURNAL = Journal("a -> b", "upgrade", note={"old": "a"})


def container(identity: str, **changes: object) -> Container:
    fields: dict[str, object] = {
        "id": identity, "service": "engine-cpu", "state": "running", "health": "healthy", "said": "ready", "code": 0,
        "restarts": 0, "image": "a", "image_id": "sha256:a", "env": {"ENGINE_PROFILE": "p.cpu", "ENGINE_ARGS": ""},
    }  # fmt: skip
    return Container(**fields | changes)  # type: ignore[arg-type]


class Told(Stack):
    """A stack whose containers and gateway answer from a script; `log` is the order in which it was told what."""

    def __init__(self, log: list[str], broken: Callable[[Mapping[str, str]], str | None] = lambda _: None) -> None:
        super().__init__(Compose(), container("old"), pause=lambda _: None)
        self.log, self._broken, self._why = log, broken, ""

    def replica(self) -> Mapping[str, Any]:
        return {"url": "http://engine:8000", "state": "draining", "calls": 0}

    def drain(self, on: bool) -> None:
        self.log.append("hold back" if on else "send again")

    def make_anew(self, variables: Mapping[str, str]) -> None:
        self.log.append(f"anew {dict(variables)}")
        self._why = self._broken(variables) or ""

    def container(self) -> Container:
        return container("new")

    def failed(self, found: Container) -> str | None:
        return self._why or None


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_journal, "FOLDER", tmp_path)
    return tmp_path


def go(stack: Told, verify: Callable[[], str | None] = lambda: None) -> Any:
    def keep() -> None:
        stack.log.append("keep")

    return swap(
        stack, lambda: {"IMAGE": "b"}, lambda: {"IMAGE": "a"}, verify, journal=JOURNAL, keep=keep, say=lambda _: None
    )


def test_a_change_that_holds_is_kept_before_requests_are_let_through() -> None:
    log: list[str] = []
    go(Told(log))
    assert log == ["hold back", "anew {'IMAGE': 'b'}", "keep", "send again"]
    assert _journal.read() is None


@pytest.mark.parametrize("how", ["does not start", "does not verify"])
def test_a_change_that_does_not_hold_is_undone_and_says_why(how: str) -> None:
    log: list[str] = []
    broken = Told(
        log, lambda variables: "no memory" if variables == {"IMAGE": "b"} and how == "does not start" else None
    )
    with pytest.raises(SwapError, match="no memory" if how == "does not start" else "no answer"):
        go(broken, lambda: "no answer")
    assert log == ["hold back", "anew {'IMAGE': 'b'}", "anew {'IMAGE': 'a'}", "send again"]
    assert _journal.read() is None


def test_an_interrupted_change_is_undone_and_stays_an_interrupt() -> None:
    log: list[str] = []

    def interrupted() -> str | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(Told(log), interrupted)
    assert log[-2:] == ["anew {'IMAGE': 'a'}", "send again"]


def test_an_engine_that_does_not_come_back_is_told_apart_and_left_to_the_next_command() -> None:
    log: list[str] = []
    with pytest.raises(NotBackError, match=r"no memory; and the engine before is not back: no memory"):
        go(Told(log, lambda _: "no memory"))
    left = _journal.read()
    assert left is not None
    assert left.phase == "undoing"
    with pytest.raises(JournalError, match="a -> b was interrupted"):
        go(Told(log))


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (DRAINING, ["send again"]),  # nothing was changed yet
        (CHANGING, ["anew {'IMAGE': 'a'}", "send again"]),
        (HELD, ["keep", "send again"]),  # it had been verified
    ],
)
def test_what_a_killed_change_left_is_ended_by_its_phase(phase: str, expected: list[str]) -> None:
    log: list[str] = []
    _journal.write(JOURNAL.at(phase))
    told = heal(Told(log), lambda: log.append("keep"), lambda: {"IMAGE": "a"}, say=lambda _: None)
    assert told is not None
    assert log == expected
    assert heal(Told(log), lambda: None, dict, say=lambda _: None) is None


def test_two_at_once_are_refused_and_a_killed_one_lets_go(folder: Path) -> None:
    source = (
        "import sys, pathlib; from scripts import _journal\n"
        "with _journal.alone(pathlib.Path(sys.argv[1])): print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", source, str(folder)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "in\n"
    with pytest.raises(JournalError, match=f"process {other.pid} is changing the stack"), _journal.alone(folder):
        pass
    other.kill()
    other.communicate()
    with _journal.alone(folder):
        pass


def test_a_journal_that_cannot_be_read_stops_everything(folder: Path) -> None:
    (folder / "swap.json").write_text(json.dumps({"what": "x"}), encoding="utf-8")
    with pytest.raises(JournalError, match="can't be read"):
        _journal.read()


def test_requests_that_do_not_end_are_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(Told):
        def replica(self) -> Mapping[str, Any]:
            return {**super().replica(), "calls": 3}

    said: list[str] = []
    _swap._ended(Busy([]), 0.0, said.append)
    assert said == ["3 requests still run after 0 s; the engine ends them while it stops"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("supervisor: the engine did not start (1 of 3 times): no room; starting it again in 5 s", "no room"),
        ("supervisor: gave up: the engine refuses its arguments: error: --x", "error: --x"),
        ("supervisor: killing the engine: not ready after 9 s (ENGINE_START_S)", "not ready after 9 s"),
        ("supervisor: ready after 30 s", None),
        ("INFO: the engine did not start", None),
    ],
)
def test_the_first_failed_start_counts(monkeypatch: pytest.MonkeyPatch, line: str, why: str | None) -> None:
    stack = Stack(Compose(), container("old"))
    monkeypatch.setattr(Compose, "tail", lambda *_: ["noise", line])
    told = stack.failed(container("new"))
    assert why in told if why and told else told is why


def test_an_image_in_the_place_of_one_that_is_built_here_is_never_built() -> None:
    """It would get the other's name and be what our Dockerfile says."""
    build = {"context": ".", "tags": ["own:1"]}
    services = {"engine-cpu": {"image": "own:2", "build": build}, "gateway": {"image": "gateway:local", "build": {}}}
    images = plan_images(services, lambda _: False)
    assert images.built_services == ("gateway",)
    assert images.to_pull == ("own:2",)
    services["engine-cpu"]["image"] = "own:1"
    assert plan_images(services, lambda _: True).built_services == ("engine-cpu", "gateway")
