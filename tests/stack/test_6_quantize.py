"""The job before the engine (field case G3): one that fails says why and no engine starts; without it nothing waits."""

from __future__ import annotations

import datetime
import json
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


# As small as the job goes: what is claimed here is the order, not the checkpoint.
CONFIG = """name: tiny-awq
source: {model: smollm2-135m-instruct}
weights: {group_size: 64}
calibration: {source: /models/texts.jsonl, format: jsonl, blocks: 1, block_tokens: 64, held_out_tokens: 1024}
clip_tokens: 16
device: cpu
"""


def test_the_engine_starts_after_the_job_and_the_next_up_finds_it_done(stack: Stack) -> None:
    """The real job: one checkpoint from the first `up`, none from the second, which takes seconds for it."""
    (stack.root / "configs/quantize/tiny.yaml").write_text(CONFIG, encoding="utf-8")
    lines = [json.dumps({"text": f"Note {number}: the bridge over the river number {number} is made of {word}. " * 8})
             for number in range(60) for word in ("stone", "wood", "iron")]  # fmt: skip
    (stack.root / "models/texts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    first = stack.make("up-cpu", COMPOSE_PROFILES="cpu,quantize", QUANTIZE="tiny")
    assert first.returncode == 0, first.stdout + first.stderr
    job, engine = stack.inspect(JOB), stack.inspect("engine-cpu")
    assert job["State"]["ExitCode"] == 0
    assert job["State"]["FinishedAt"] < engine["State"]["StartedAt"]
    assert job["Config"]["User"] != "0:0"
    assert job["HostConfig"]["ReadonlyRootfs"] is True
    made = sorted(path for path in (stack.root / "models/tiny-awq").glob("*/manifest.json"))
    assert len(made) == 1
    assert stack.chat().status_code == 200
    second = stack.make("up-cpu", COMPOSE_PROFILES="cpu,quantize", QUANTIZE="tiny")
    assert second.returncode == 0, second.stdout + second.stderr
    assert sorted((stack.root / "models/tiny-awq").glob("*/manifest.json")) == made
    assert stack.inspect("engine-cpu")["Id"] == engine["Id"]
    again = stack.inspect(JOB)["State"]
    assert again["StartedAt"] > engine["State"]["StartedAt"]
    assert seconds_between(again["StartedAt"], again["FinishedAt"]) < 30


def seconds_between(start: str, end: str) -> float:
    times = [datetime.datetime.fromisoformat(text[:26]) for text in (start, end)]
    return (times[1] - times[0]).total_seconds()


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


def test_compose_alone_keeps_the_order_and_only_warns_of_a_failed_job(stack: Stack) -> None:
    """Without `make`: a dependency that need not be there need not succeed either. The gateway answers at once."""
    environment = {"COMPOSE_PROFILES": "cpu,quantize-cpu", "QUANTIZE": "broken", "QUANTIZE_USER": "10004:10004"}
    up = stack.run("docker", "compose", "up", "--detach", "--no-build", **environment)
    assert up.returncode == 0, up.stderr
    assert f'optional dependency \\"{JOB}\\" didn\'t complete successfully: exit 1' in up.stderr
    job, engine, gateway = (stack.inspect(name)["State"] for name in (JOB, "engine-cpu", "gateway"))
    assert gateway["StartedAt"] < engine["StartedAt"]
    assert job["FinishedAt"] < engine["StartedAt"]
