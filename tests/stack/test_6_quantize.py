"""The job before the engine (field case G3): one that fails says why and no engine starts; without it nothing waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stack.checkout import Stack
from tests.stack.test_5_down import containers

JOB = "quantize-cpu"


@pytest.fixture(autouse=True)
def _nothing_runs(stack: Stack) -> Iterator[None]:
    assert containers(stack) == []
    yield
    stack.compose("down", "--remove-orphans", "--timeout", "5")


def test_a_job_that_fails_is_named_with_its_reason_and_no_engine_starts(stack: Stack) -> None:
    """The real job, refusing a configuration; a first start that fails leaves nothing."""
    (stack.root / "configs/quantize/broken.yaml").write_text("name: broken\nsource: {}\n", encoding="utf-8")
    failed = stack.make("up-cpu", COMPOSE_PROFILES="cpu,quantize", QUANTIZE="broken")
    assert failed.returncode != 0
    first = failed.stderr.splitlines()[0]
    assert first.startswith(f"up: {JOB} ended with exit code 1, the engine was not started: ")
    assert "/configs/quantize/broken.yaml: " in first
    assert "source.model" in first
    assert containers(stack) == []


def test_compose_itself_starts_no_engine_after_a_failed_job(stack: Stack) -> None:
    """Without `make`: the order is in compose.yaml, and the gateway answers at once, with the reason for its 503."""
    environment = {"COMPOSE_PROFILES": "cpu,quantize-cpu", "QUANTIZE": "broken", "QUANTIZE_USER": "10004:10004"}
    up = stack.run("docker", "compose", "up", "--detach", "--no-build", **environment)
    assert up.returncode != 0
    assert f'service "{JOB}" didn\'t complete successfully: exit 1' in up.stderr
    assert stack.compose("ps", "--quiet", "--status", "running", "engine-cpu").stdout == ""
    assert stack.http.get(f"{stack.url}/healthz").status_code == 200
    assert stack.http.get(f"{stack.url}/readyz").status_code == 503
