"""--stop-engine: the engine is stopped for the job and started again, however the job ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts._compose import Compose, ComposeError, Container
from scripts.quantization import QuantizeError, engine_stop, source


def container(service: str, state: str = "running", health: str = "healthy") -> Container:
    return Container(service, service, state, health, "", 0, 0, "image", "id", {})


class Scripted(Compose):
    """Docker's answers; keeps what was asked of it."""

    def __init__(self, *found: Container, fails: str = "") -> None:
        super().__init__()
        self.found, self.fails = list(found), fails
        self.asked: list[tuple[str, ...]] = []

    def containers(self) -> list[Container]:
        if self.fails == "containers":
            raise ComposeError("docker is not installed: docs.docker.com/engine/install")
        return self.found

    def run(self, *arguments: str) -> str:
        self.asked.append(arguments)
        if self.fails == arguments[0]:
            raise ComposeError("no such thing")
        return ""


def job(compose: Compose, said: list[str], error: BaseException | None = None) -> None:
    times = iter([0.0, *[95.0] * 10])
    with engine_stop.stopped(compose, said.append, lambda: next(times)):
        said.append("the job")
        if error is not None:
            raise error


ENGINE: Sequence[Container] = (container("gateway"), container("engine"))


def test_the_engine_is_away_for_the_job_and_its_downtime_is_said() -> None:
    compose, said = Scripted(*ENGINE), list[str]()
    job(compose, said)
    assert compose.asked == [("stop", "engine"), ("start", "engine")]
    assert said == [
        "stopping engine: requests wait or get 503 until it is ready again",
        "the job",
        "starting engine again",
        "engine is ready; it was away for 95 s",
    ]


@pytest.mark.parametrize("error", [QuantizeError("too little"), KeyboardInterrupt(), RuntimeError("bug")])
def test_it_is_started_again_however_the_job_ends(error: BaseException) -> None:
    compose = Scripted(*ENGINE)
    with pytest.raises(type(error)):
        job(compose, [], error)
    assert compose.asked[-1] == ("start", "engine")


@pytest.mark.parametrize("found", [[], [container("gateway")], [container("engine", "exited")]])
def test_without_a_running_engine_nothing_is_stopped(found: list[Container]) -> None:
    compose = Scripted(*found)
    with pytest.raises(QuantizeError, match="no engine of this stack runs"):
        job(compose, [])
    assert compose.asked == []


@pytest.mark.parametrize("fails", ["containers", "stop"])
def test_without_docker_the_job_does_not_begin(fails: str) -> None:
    said: list[str] = []
    with pytest.raises(QuantizeError, match="--stop-engine: "):
        job(Scripted(*ENGINE, fails=fails), said)
    assert "the job" not in said


def test_an_engine_that_does_not_start_is_said_and_the_result_is_kept() -> None:
    said: list[str] = []
    job(Scripted(*ENGINE, fails="start"), said)
    assert said[-1] == "engine could not be started (no such thing): make up"


def test_a_source_in_models_dir_is_named_from_there(tmp_path: Path) -> None:
    """A container sees MODELS_DIR at another place than its host."""
    version = tmp_path / "models" / "small" / "v1"
    version.mkdir(parents=True)
    (version / "config.json").write_text("{}")
    (tmp_path / "models" / "small" / "current").symlink_to("v1")
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    found = source.locate("small", "main", tmp_path / "models", environ)
    assert (found.model, found.revision, found.directory) == ("small/v1", "local", version)
    assert source.locate(str(version), "main", tmp_path / "models", environ) == found
    assert source.locate(str(version), "main", tmp_path / "other", environ).model == str(version)
